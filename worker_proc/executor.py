"""Runs steps: copies, begins, rows, ends, in the order sent; knows requests, not sockets.

A step is launched, drawn, and finished. Where a device computes beside the host, the next one is launched before this
one is finished (``launched.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from common.errors import InvariantError
from common.messages import (
    BeginRequest,
    ForwardBatch,
    RowFlag,
    StepResult,
    pack_f32,
    pack_i32,
    unpack_i32,
)
from worker_proc.drawing import Drawing
from worker_proc.grammar.overlap import GrammarThreads
from worker_proc.grammar_protocol import GrammarBackend, bitmask_words
from worker_proc.launched import LaunchedStep, RowOutcome, late_ids
from worker_proc.packing import pack, plan_row
from worker_proc.runner import AheadRunner, ModelRunner
from worker_proc.sampling.at_once import AtOnce
from worker_proc.sampling.request import AheadSampler, Sampler
from worker_proc.slots import Slot
from worker_proc.speculation.speculator import Speculator


class StepExecutor:
    """The worker's requests and their steps.

    ``grammar_backend`` is None where constrained decoding is off: requests with a grammar then fail.
    ``ahead``: the same runner and sampler where both can go on before the host has seen an id; None elsewhere.
    ``speculator``: proposes ids to be computed beside the known ones; None for none, as where steps run ahead.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        grammar_backend: GrammarBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ahead: tuple[AheadRunner, AheadSampler] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        if ahead is not None and speculator is not None:
            raise InvariantError("drafts follow ids that the host has seen; steps that run ahead do not wait for it")
        self.runner = runner
        self.sampler = sampler
        self._clock = clock
        self._ahead_runner = None if ahead is None else ahead[0]
        self._speculator = speculator
        self._finished_at = 0.0
        self._slots: dict[int, Slot] = {}
        num_words = bitmask_words(runner.vocab_size)
        self._grammars = None if grammar_backend is None else GrammarThreads(grammar_backend, num_words, clock=clock)
        self._drawing = Drawing(runner, AtOnce(sampler) if ahead is None else ahead[1], self._grammars)

    def reset(self) -> None:
        """Forget every request. Pages need no clearing: nobody reads a cell before it is written."""
        for number in list(self._slots):
            self._end(number)

    def close(self) -> None:
        """Stop the helper thread and the runner."""
        if self._grammars is not None:
            self._grammars.close()
        self.runner.close()

    # ------------------------------------------------------------------ one step

    def execute(self, batch: ForwardBatch, idle_s: float = 0.0) -> StepResult:
        """Run one step. An exception means the worker's state is lost, never a single request's fault."""
        return self.finish(self.launch(batch, idle_s))

    @property
    def runs_ahead(self) -> bool:
        """A step may be launched while the one before it is under way."""
        return self._ahead_runner is not None

    def launch(self, batch: ForwardBatch, idle_s: float = 0.0, before: LaunchedStep | None = None) -> LaunchedStep:
        """Launch a step's forward pass, and its drawing unless that must wait for what ``before`` gives.

        ``before``: the step under way, if there is one. It is drawn, and to be finished next; then ``draw`` this one.
        """
        if before is not None and not before.is_drawn:
            raise InvariantError(f"step {batch.step} is launched and step {before.batch.step} is not drawn")
        step = LaunchedStep(batch, idle_s, started=time.time(), begun=self._clock())
        self._copy(batch)
        for record in batch.begins:
            self._begin(record)
        step.outcomes = [RowOutcome() for _ in range(len(unpack_i32(batch.slots)))]
        self._plan(step)
        if self._speculator is not None:
            self._speculator.add(step.rows, self.runner.page_size)
        step.forwarded = self._clock()
        if step.rows:
            if before is None:
                step.masks = self._drawing.masks_ahead(step.rows)
            self._forward(step, before)
            step.forwarded = self._clock()
            self._drawing.begin_prompt_logprobs(step)
        if self.runs_ahead and (before is None or not any(row.samples and row.slot.needs_host for row in step.rows)):
            self.draw(step)
        return step

    def _forward(self, step: LaunchedStep, before: LaunchedStep | None) -> None:
        packed = pack(step.rows, self.runner.page_size)
        late = late_ids(step.rows, packed, before)
        if late is None or self._ahead_runner is None:
            step.logits = self.runner.forward(packed)
        else:
            step.logits = self._ahead_runner.forward_late(packed, late)
        for row in step.rows:
            row.slot.computed_len += row.length

    def draw(self, step: LaunchedStep) -> None:
        """Launch a step's drawing, if it is not. The step before it is finished, or this one does not need it."""
        if step.is_drawn:
            return
        self._drawing.begin(step)
        step.is_drawn, step.logits = True, None  # the next step needs the room
        for slot in unpack_i32(step.batch.ends):  # now, since the next step may begin others in their slots
            self._end(int(slot))

    def finish(self, step: LaunchedStep, after: LaunchedStep | None = None) -> StepResult:
        """Wait for what a step gave. ``after``: the step launched since, whose masks are computed from now on."""
        batch, outcomes = step.batch, step.outcomes
        self.draw(step)
        self._drawing.see(step)
        if after is not None and not after.is_drawn:
            after.masks = self._drawing.masks_ahead(after.rows)
        prompt_logprobs = self._drawing.prompt_logprobs(step)
        num_drafts = self._learn(step)
        if self.runs_ahead:
            step.forwarded = self._clock()
            step.begun = max(step.begun, self._finished_at)  # until then the device had the step before
        self._finished_at = self._clock()
        return StepResult(
            epoch=batch.epoch,
            step=batch.step,
            num_ids=pack_i32([len(outcome.ids) for outcome in outcomes]),
            ids=pack_i32([token for outcome in outcomes for token in outcome.ids]),
            flags=bytes(outcome.flags for outcome in outcomes),
            logprobs=pack_f32([value for outcome in outcomes for value in outcome.logprobs]),
            top_logprobs=[top for outcome in outcomes for top in outcome.top],
            prompt_logprobs=prompt_logprobs,
            failures=step.failures,
            num_drafts=num_drafts,
            started=step.started,
            forward_s=step.forwarded - step.begun,
            sample_s=self._finished_at - step.forwarded,
            idle_s=step.idle_s,
        )

    def _learn(self, step: LaunchedStep) -> bytes:
        """Which drafts were right. Returns ``StepResult.num_drafts``."""
        if self._speculator is None:
            return b""
        self._speculator.took(step.rows, self._clock() - step.begun)
        counts = [0] * len(step.outcomes)
        for row in step.rows:
            counts[row.index] = row.num_drafts
            self._speculator.learn(row, step.outcomes[row.index].ids)
        return pack_i32(counts) if any(counts) else b""

    def _copy(self, batch: ForwardBatch) -> None:
        if batch.copies:
            pairs = unpack_i32(batch.copies).reshape(-1, 2)
            self.runner.copy_pages(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))

    def _begin(self, record: BeginRequest) -> None:
        slot = Slot(record)
        slot.failure = slot.validate(self.runner.vocab_size, self.runner.page_size)
        if record.grammar is not None and not slot.failure:
            if self._grammars is None:
                slot.failure = "constrained decoding is switched off (--grammar-backend none)"
            else:
                jumps = slot.sampling.logprobs is None
                slot.grammar = self._grammars.begin(record.grammar, slot.outputs().tolist(), jumps)
        self._slots[record.slot] = slot

    def _end(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None and isinstance(slot.grammar, Future):
            slot.grammar.cancel()  # nobody needs it any more, and others wait for the thread

    def _plan(self, step: LaunchedStep) -> None:
        """Find the rows that compute something; page tables grow for all."""
        batch = step.batch
        new_pages, taken = unpack_i32(batch.new_pages), 0
        columns = (unpack_i32(batch.slots), unpack_i32(batch.num_tokens), unpack_i32(batch.num_new_pages))
        for index, (number, num_tokens, num_pages) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            slot = self._slots.get(number)
            if slot is None:
                raise InvariantError(f"step {batch.step}: row {index} names slot {number}, where no request began")
            slot.pages.extend(new_pages[taken : taken + num_pages])
            taken += num_pages
            if slot.finished or slot.ends_unseen:
                step.outcomes[index].flags |= RowFlag.SKIPPED
                continue
            row = slot.failure or plan_row(index, slot, num_tokens, self.runner.page_size)
            if isinstance(row, str):
                step.fail(index, slot, row)
            else:
                step.rows.append(row)
