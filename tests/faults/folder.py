"""The model of the fault matrix and the soak."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.tiny_folder import make_tiny_folder

CONTEXT_LEN = 32768


def make_long_folder(folder: Path) -> Path:
    """Fill ``folder`` with the tiny random Llama, with a context in which a prompt takes a while; returns it.

    None of its weights depends on the number of positions.
    """
    make_tiny_folder(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LEN}))
    return folder
