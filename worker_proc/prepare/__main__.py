"""Entry point: ``python -m worker_proc.prepare --model X [--dtype D ...]``; the folder is the last line, as JSON."""

import sys

from worker_proc.prepare.command import main

sys.exit(main())
