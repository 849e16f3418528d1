"""Entry point: ``python -m worker_proc``."""

import sys

from common.process import run
from worker_proc.main import main

sys.exit(run("worker", main))
