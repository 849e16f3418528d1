"""The CPU fast path as a :class:`~worker_proc.runner.ModelRunner`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_proc.kernels.cpu.arch import Decoder
from worker_proc.kernels.cpu.forward import PHASES
from worker_proc.kernels.cpu.host_side import HostSide, what_is_wrong
from worker_proc.kernels.cpu.isa import detect
from worker_proc.kernels.cpu.layout import BLOCK_TOKENS, SEGMENT_TOKENS
from worker_proc.kernels.cpu.model_image import ModelImage
from worker_proc.kernels.cpu.pool import KvPool
from worker_proc.kernels.cpu.step_function import Progress, StepFunction, silent
from worker_proc.kernels.cpu.thread_team import ThreadTeam
from worker_proc.kernels.cpu.workspace import Workspace
from worker_proc.runner import I32, PackedBatch


class CpuFastRunner:
    """A decoder on the CPU: one compiled function, packed bf16 weights, paged KV.

    Logits of a row depend on its own tokens alone, bit for bit: not on the batch, the chunks, what
    was cached, the pages or the number of threads. (They do depend on the machine's instruction set.)
    """

    name = "cpu-fast"
    batch_invariant = True
    dtype = "bfloat16"

    def __init__(self, image: ModelImage, step: StepFunction, page_size: int, num_threads: int) -> None:
        self.isa = step.isa
        self.page_size = page_size
        self.tile_tokens = step.isa.tile_tokens
        self.vocab_size = image.shape.vocab
        self.num_threads = num_threads
        self._image = image
        self._workspace = Workspace(image, num_threads)
        self._host = HostSide()
        self._pool: KvPool | None = None
        self._profile: NDArray[np.int64] | None = None
        shared = (image.models, image.layers, self._workspace.steps, self._workspace.owns)
        self._team = ThreadTeam(step.compiled(), num_threads, *shared)

    @classmethod
    def try_build(
        cls,
        hf_model: Any,
        page_size: int,
        num_threads: int,
        progress: Progress = silent,
        instruction_sets: tuple[str, ...] = (),
        step: StepFunction | None = None,
    ) -> CpuFastRunner | str:
        """Pack a transformers causal model (bf16); or the reason why this path does not cover it.

        ``hf_model``'s weights are copied: drop the model afterwards. The rest as in :meth:`from_decoder`.
        """
        from worker_proc.kernels.cpu.read_model import describe_or_reason

        decoder = describe_or_reason(hf_model)
        if isinstance(decoder, str):
            return decoder
        return cls.from_decoder(decoder, page_size, num_threads, progress, instruction_sets, step)

    @classmethod
    def from_decoder(
        cls,
        decoder: Decoder,
        page_size: int,
        num_threads: int,
        progress: Progress = silent,
        instruction_sets: tuple[str, ...] = (),
        step: StepFunction | None = None,
    ) -> CpuFastRunner | str:
        """Pack a model that was read, copying it; or the reason why this machine or page size does not do.

        ``instruction_sets`` restricts the choice to these names of ``isa.py``; empty: the fastest.
        ``step``: the step function, compiling since before the weights were loaded.
        """
        if page_size % BLOCK_TOKENS or SEGMENT_TOKENS % page_size:
            return f"page size {page_size}; the CPU fast path takes 16, 32, 64 or 128"
        if num_threads < 1:
            return f"{num_threads} threads; at least 1 is needed"
        isa = step.isa if step is not None else detect(instruction_sets)
        if isinstance(isa, str):
            return isa
        step = step or StepFunction(isa, progress)
        progress(f"cpu-fast: packing weights for {isa.name}")
        return cls(ModelImage(decoder, page_size, isa, num_threads), step, page_size, num_threads)

    def kv_bytes_per_page(self) -> int:
        """Bytes of a page over all layers."""
        return self._image.page_bytes * len(self._image.layers)

    def weight_bytes(self) -> int:
        """Bytes of packed weights and of an embedding of its own."""
        return self._image.weight_bytes

    def allocate(self, num_pages: int) -> None:
        """Create the KV pool, ``[num_pages][layers]``. Raises MemoryError with the arithmetic."""
        if self._pool is not None:
            raise RuntimeError("the KV pool exists already")
        if num_pages < 1:
            raise ValueError(f"{num_pages} KV pages; at least 1 is needed")
        self._pool = KvPool(num_pages, self.kv_bytes_per_page())
        for index, layer in enumerate(self._image.layers):
            layer["kv"] = self._pool.address + index * self._image.page_bytes

    def _check(self, batch: PackedBatch) -> int:
        """The highest page, if all is right: what is wrong here would be a write to a wrong address there."""
        if self._pool is None:
            raise RuntimeError("allocate() the KV pool before forward()")
        positions, num_pages = self._image.shape.max_positions, self._pool.num_pages
        highest = self._host.check_batch(
            batch.ids, batch.positions, batch.query_start, batch.context_lens, batch.page_table, batch.logit_rows,
            self.vocab_size, positions, num_pages, self.page_size,
        )  # fmt: skip
        if highest < 0:
            raise ValueError(what_is_wrong(batch, self.vocab_size, positions, num_pages, self.page_size))
        return int(highest)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        """Logits float32 [R, vocab_size], a view that the next call overwrites.

        Raises ValueError for ids, positions or pages out of range, before anything is computed.
        """
        highest_page = self._check(batch)
        assert self._pool is not None  # or it would have said so
        self._pool.reach(highest_page)
        self._workspace.load(batch)
        self._team.run()
        return self._workspace.logit_space[: len(batch.logit_rows), : self.vocab_size]

    def argmax(self, rows: I32) -> tuple[I32, NDArray[np.float32]]:
        """See ``ArgmaxRunner``. Looks through the largest of each 32 logits, which the head's threads have noted."""
        tokens, largest = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
        space = self._workspace
        self._host.find_largest(space.logit_space, rows, self.vocab_size, space.first_peak, tokens, largest)
        return tokens, largest

    def copy_pages(self, src: I32, dst: I32) -> None:
        """Copy pages in every layer, in order (a page may be source after it was destination)."""
        if self._pool is None:
            raise RuntimeError("allocate() the KV pool before copy_pages()")
        pages, num_pages = self._pool.pages, self._pool.num_pages
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            if not (0 <= a < num_pages and 0 <= b < num_pages):
                raise ValueError(f"page copy {a} -> {b} outside 0..{num_pages - 1}")
            pages[b] = pages[a]

    def profile(self, on: bool) -> dict[str, tuple[float, float, float]]:
        """Switch the per-phase clocks on or off.

        Returns milliseconds since they were switched on, mean over threads, by phase: processor time of
        the work, wall time of the work (more, when cores were lent to other processes), waiting.
        """
        found = {}
        if self._profile is not None:
            mean = self._profile.mean(axis=0) / 1e6
            found = {name: (float(c), float(w), float(b)) for name, (c, w, b) in zip(PHASES, mean, strict=False)}
        self._profile = np.zeros((self.num_threads, len(PHASES) + 1, 3), np.int64) if on else None
        self._workspace.steps[0]["profile"] = 0 if self._profile is None else self._profile.ctypes.data
        return found

    def close(self) -> None:
        """Stop the threads and free the pool. Idempotent."""
        self._team.close()
        if self._pool is not None:
            self._pool.close()
        self._pool = None
