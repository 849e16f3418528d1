"""The command ``python -m worker_proc.prepare``: download and convert, say where the folder is.

Takes launch.py's flags. Words and progress bars go to stderr; the last line of stdout is
``{"folder": "...", "name": "...", "tokenizer": "..."}``. Exit code 2 with a message when the model
cannot be used.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from common import flags
from common.errors import ConfigError
from common.process import EXIT_CONFIG, EXIT_OK, die_with_parent, setup_logging
from worker_proc.prepare import resolve


def main(argv: list[str] | None = None) -> int:
    """Prepare the model named by the flags; returns the exit code."""
    # Any other library that prints to descriptor 1 would spoil the last line: it gets stderr.
    answer = os.dup(1)
    os.dup2(2, 1)
    config = flags.parse(argv, prog="python -m worker_proc.prepare")
    die_with_parent()
    setup_logging(config, "prepare")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars in a log file are noise
    try:
        found = resolve.make_ready(config.model)
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        return EXIT_CONFIG
    line = json.dumps({"folder": str(found.folder), "name": found.name, "tokenizer": found.tokenizer})
    os.write(answer, line.encode() + b"\n")
    return EXIT_OK
