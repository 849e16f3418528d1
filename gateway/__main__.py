"""Entry point: ``python -m gateway``."""

import sys

from common.process import run
from gateway.main import main

sys.exit(run("gateway", main))
