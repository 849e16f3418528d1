"""Entry point: ``python -m tokenizer_proc``."""

import sys

from common.process import run
from tokenizer_proc.main import main

sys.exit(run("tokenizer", main))
