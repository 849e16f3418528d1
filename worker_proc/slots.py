"""The worker's state of one running request: ids, page table, how far its K/V is computed."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from common.messages import BeginRequest, SamplingParams, unpack_i32
from worker_proc.grammar_protocol import GrammarSession
from worker_proc.sampling.request import penalises
from worker_proc.speculation.lookup import PromptLookup

I32 = NDArray[np.int32]


class GrowingI32:
    """An int32 array that grows at its end (amortised doubling). ``view()`` is valid until the next append."""

    __slots__ = ("_data", "size")

    def __init__(self, initial: I32, room: int = 64) -> None:
        self._data = np.empty(initial.size + room, np.int32)
        self._data[: initial.size] = initial
        self.size = int(initial.size)

    def view(self) -> I32:
        """The values, without a copy."""
        return self._data[: self.size]

    def part(self, begin: int, end: int) -> I32:
        """``view()[begin:end]``."""
        return self._data[begin : min(end, self.size)]

    def append(self, value: int) -> None:
        """Add one value."""
        self._reserve(1)
        self._data[self.size] = value
        self.size += 1

    def extend(self, values: I32) -> None:
        """Add several values."""
        self._reserve(values.size)
        self._data[self.size : self.size + values.size] = values
        self.size += int(values.size)

    def _reserve(self, count: int) -> None:
        if self.size + count > self._data.size:
            grown = np.empty(max(2 * self._data.size, self.size + count), np.int32)
            grown[: self.size] = self.view()
            self._data = grown


class Slot:
    """One request in the worker, rebuilt from a ``BeginRequest``."""

    __slots__ = (
        "computed_len", "drawn_at", "end_ids", "failure", "finished", "grammar", "ids", "lookup", "pages", "penalised",
        "prompt_len", "rid", "sampling", "unseen",
    )  # fmt: skip

    def __init__(self, begin: BeginRequest) -> None:
        self.rid = begin.rid
        self.ids = GrowingI32(unpack_i32(begin.ids), room=256)
        self.prompt_len = begin.prompt_len
        self.computed_len = begin.computed_len
        self.pages = GrowingI32(unpack_i32(begin.pages))
        self.sampling: SamplingParams = begin.sampling
        self.end_ids = frozenset(begin.eos_token_ids) | frozenset(begin.sampling.stop_token_ids)
        self.grammar: GrammarSession | Future[GrammarSession] | None = None
        """A session, or the future of one that is being compiled while the prompt is computed."""
        self.finished = False
        """The worker has seen the request's end; rows that were already on their way are skipped."""
        self.penalised = penalises(begin.sampling)
        self.lookup: PromptLookup | None = None
        """Made when drafts are first looked for."""
        self.unseen = 0
        """Outputs drawn on the device that the host has not seen yet; ``ids`` ends before them."""
        self.drawn_at = 0
        """Place of the last of them among the ids of its step."""
        self.failure = ""
        """Why the request cannot go on; reported with its next row."""

    @property
    def num_known(self) -> int:
        """Ids known, here or to the device: prompt and outputs."""
        return self.ids.size + self.unseen

    @property
    def num_outputs(self) -> int:
        """Output ids known; also the output index of the next one."""
        return self.num_known - self.prompt_len

    @property
    def ends_unseen(self) -> bool:
        """The last of the outputs that were drawn and not seen is the last one allowed."""
        return self.unseen > 0 and self.sampling.max_tokens is not None and self.num_outputs >= self.sampling.max_tokens

    @property
    def needs_host(self) -> bool:
        """The next id must not be drawn before the host has seen, and handled, all ids before it."""
        return self.grammar is not None or (self.penalised and self.unseen > 0)

    def capacity(self, page_size: int) -> int:
        """Positions that the page table reaches."""
        return self.pages.size * page_size

    def outputs(self) -> I32:
        """The output ids."""
        return self.ids.view()[self.prompt_len :]

    def append_output(self, token: int) -> None:
        """Add a sampled or forced id and note the end it may mean."""
        self.ids.append(token)
        max_tokens = self.sampling.max_tokens
        if token in self.end_ids or (max_tokens is not None and self.ids.size - self.prompt_len >= max_tokens):
            self.finished = True

    def validate(self, vocab_size: int, page_size: int) -> str:
        """What is wrong with the request, empty if nothing: a bad id must not reach an embedding lookup."""
        ids = self.ids.view()
        if ids.size == 0 or not 0 <= self.prompt_len <= ids.size:
            return f"{ids.size} ids with a prompt of {self.prompt_len}"
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            return f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        if not 0 <= self.computed_len < ids.size or self.computed_len > self.capacity(page_size):
            return f"{self.computed_len} computed positions of {ids.size} ids in {self.pages.size} pages"
        return ""
