"""What must be so before any test module is imported, and before any process of theirs is started.

Where no GPU is, Triton's kernels run under its interpreter. Triton reads that once, when it is first imported,
and transformers imports it.

A shell without job control starts what it puts into the background with SIGINT ignored, and processes hand that on.
launch.py leaves a signal alone that it finds ignored, so the tests would wait in vain for it to end.
"""

import os
import signal
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
