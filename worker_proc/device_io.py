"""Between host and device: copies that nobody waits for before he needs them, and how much memory is left.

The worker uses these classes only, so that what it does around a GPU (how many copies, when it waits,
how the pool is sized) is tested without one.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Download(Protocol):
    """A copy to the host that may still be under way."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> NDArray[Any]:
        """The values, once they are there."""
        ...


class DeviceIo(Protocol):
    """Copies between NumPy arrays and a device."""

    device: torch.device

    def upload(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, contiguous. The host does not wait, and may change the array at once."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Begin a copy to the host, after what was launched so far."""
        ...


class _Done:
    """A download that needed no copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._array: NDArray[Any] = tensor.numpy()

    def ready(self) -> bool:
        """See ``Download``."""
        return True

    def wait(self) -> NDArray[Any]:
        """See ``Download``."""
        return self._array


class HostIo:
    """The device is the CPU."""

    device = torch.device("cpu")

    def upload(self, array: NDArray[Any]) -> Tensor:
        """See ``DeviceIo``."""
        return torch.from_numpy(np.array(array, order="C"))

    def download(self, tensor: Tensor) -> Download:
        """See ``DeviceIo``."""
        return _Done(tensor)


class _PinnedDownload:
    """A copy into pinned memory with an event behind it."""

    def __init__(self, tensor: Tensor) -> None:
        self._buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._buffer.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        """See ``Download``."""
        return bool(self._event.query())

    def wait(self) -> NDArray[Any]:
        """See ``Download``."""
        self._event.synchronize()
        return self._buffer.numpy()


class CudaIo:
    """Copies through pinned memory. Torch's host allocator gives a block out again only when its copies are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, array: NDArray[Any]) -> Tensor:
        """See ``DeviceIo``."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.device, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        """See ``DeviceIo``."""
        return _PinnedDownload(tensor)


def make_io(device: torch.device) -> DeviceIo:
    """The copies of a device."""
    return CudaIo(device) if device.type == "cuda" else HostIo()
