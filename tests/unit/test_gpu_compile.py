"""Every GPU kernel compiles for an H100 or H200, in the shapes that are served, without spilling registers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(900)
def test_kernels_compile_and_fit() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gpu_compile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["unfit"] == [] and report["variants"] > 30
