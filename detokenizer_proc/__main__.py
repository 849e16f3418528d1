"""Entry point: ``python -m detokenizer_proc``."""

import sys

from common.process import run
from detokenizer_proc.main import main

sys.exit(run("detokenizer", main))
