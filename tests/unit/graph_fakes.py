"""What stands in for a CUDA graph where there is no GPU. Does without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class CallingAgain:
    """A ``Capture`` whose graph calls the function again, with the result in one place as a graph has it.

    ``fails_at``: which recording cannot be made, 0 for none.
    """

    def __init__(self, fails_at: int = 0) -> None:
        self.replays = self.recorded = 0
        self._fails_at = fails_at

    def __call__(self, work: Callable[[], Tensor]) -> Any:
        result, owner = work(), self
        self.recorded += 1
        if self.recorded == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")

        class Recorded:
            def replay(self) -> Tensor:
                owner.replays += 1
                return result.copy_(work())

        return Recorded()
