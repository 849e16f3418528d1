"""Entry point: ``python -m scheduler_proc``."""

import sys

from common.process import run
from scheduler_proc.main import main

sys.exit(run("scheduler", main))
