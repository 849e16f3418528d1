"""Processes beside the worker let it finish what it is at, where no core is spare."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
from common.cores import give_way
give_way(int(sys.argv[1]))
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0), found[0])
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's scheduling classes")
@pytest.mark.parametrize(("num_cores", "policy"), [(1, "SCHED_BATCH"), (7, "SCHED_BATCH"), (8, "SCHED_OTHER")])
def test_a_process_and_its_threads_give_way_where_no_core_is_spare(num_cores: int, policy: str) -> None:
    out = subprocess.run([sys.executable, "-c", PROGRAM, str(num_cores)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(getattr(os, policy))] * 2
