"""Write golden.json anew: ``python -m tests.wire.make_golden``. Only after a change of the wire that is meant."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tests.wire.samples import SAMPLES

PATH = Path(__file__).with_name("golden.json")


def golden() -> dict[str, str]:
    """Name of the message -> its bytes in hex."""
    return {type(sample).__name__: msgspec.msgpack.encode(sample).hex() for sample in SAMPLES}


if __name__ == "__main__":
    PATH.write_text(json.dumps(golden(), indent=1) + "\n")
