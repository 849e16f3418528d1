"""How long from ``python launch.py`` until the server answers: cold code cache and warm.

    python -m bench.startup [--model X] [--runs 3]

The model itself is cached before the first measurement (a first launch, not counted). "Cold" runs
have an empty folder for compiled code. The last line is one JSON object, seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace

from bench import servers


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    spec = servers.quintet(model=args.model)
    warm, cold = [], []
    with servers.serve(spec):
        pass
    for _ in range(args.runs):
        with servers.serve(spec) as server:
            warm.append(server.ready_s)
        with (
            tempfile.TemporaryDirectory() as empty,
            servers.serve(replace(spec, env={"QUINTET_COMPILE_CACHE": empty})) as server,
        ):
            cold.append(server.ready_s)
        print(f"warm {warm[-1]:.2f} s, cold code cache {cold[-1]:.2f} s", flush=True)
    print(json.dumps({"warm_s": round(statistics.median(warm), 2), "cold_s": round(statistics.median(cold), 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
