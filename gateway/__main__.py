"""Entry point: ``python -m gateway``, started by the supervisor or, on another host, by hand (``gateway/join.py``)."""

import sys

from common.process import run
from gateway import join
from gateway.main import main

if any(argument.startswith("--run-dir") for argument in sys.argv[1:]):
    sys.exit(run("gateway", main))
sys.exit(join.main())
