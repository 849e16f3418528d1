"""A process of the fleet that does nothing but live, in the way a test wants it to.

``python role.py <role> --run-dir ... --index ... --generation ...``; ``FAKE_MODES`` holds JSON:
name -> list of modes, one per generation, the last one for all later ones.
"""

from __future__ import annotations

import json
import os
import sys
import time

from common.errors import ConfigError
from common.process import ProcessContext, run

BEAT_S = 0.02


def mode_of(context: ProcessContext) -> tuple[str, float]:
    modes = json.loads(os.environ.get("FAKE_MODES", "{}")).get(context.name, ["ok"])
    name, _, value = modes[min(context.generation, len(modes) - 1)].partition(":")
    return name, float(value or 0)


def main(context: ProcessContext) -> None:
    mode, value = mode_of(context)
    if mode == "config":
        raise ConfigError("the model has 7 heads and that cannot be")
    if mode == "exit":
        sys.exit(int(value))
    inbox = context.channels.receiver("scheduler") if context.role == "scheduler" else None
    turns = 0
    while not context.stopping or mode == "ignore_term":
        turns += 1
        time.sleep(BEAT_S)
        context.beat(
            ready=mode != "never_ready",
            progress=0 if mode == "stuck" else turns,
            busy_since=1.0 if mode == "stuck" else 0.0,
            info={"dtype": "float32", "pages": "1024 x 16"},
        )
        if inbox is not None:
            with (context.run_dir / "fleet.jsonl").open("a") as out:
                for fleet in inbox.receive():
                    out.write(json.dumps({"generations": fleet.generations, "draining": fleet.draining}) + "\n")
    if mode == "drain":
        end = time.monotonic() + value
        while time.monotonic() < end:
            time.sleep(BEAT_S)
            context.beat(ready=True, progress=0)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    sys.exit(run(role, main))
