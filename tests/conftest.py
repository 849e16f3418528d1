"""Where no GPU is, Triton's kernels run under its interpreter. Triton reads that once, when it is first imported,
and transformers imports it, so it is said here, before any test module is."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
