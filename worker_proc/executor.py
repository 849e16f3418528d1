"""Runs steps: copies, begins, rows, ends, in the order sent; knows requests, not sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from common.errors import InvariantError, raise_if_starved
from common.messages import (
    BeginRequest,
    ForwardBatch,
    PromptLogprobs,
    RowFailure,
    RowFlag,
    StepResult,
    TopLogprobs,
    pack_f32,
    pack_i32,
    unpack_i32,
)
from worker_proc.grammar.overlap import GrammarThreads, MaskAhead
from worker_proc.grammar_protocol import GrammarBackend, GrammarSession, bitmask_words
from worker_proc.packing import Row, pack, plan_row
from worker_proc.runner import ModelRunner
from worker_proc.sampling.request import LogprobRequest, Sampler, SampleRequest, TopTokens
from worker_proc.slots import Slot


@dataclass(slots=True)
class RowOutcome:
    """What a step gave one row."""

    ids: list[int] = field(default_factory=list)
    flags: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


class StepExecutor:
    """The worker's requests and their steps.

    ``grammar_backend`` is None where constrained decoding is off: requests with a grammar then fail.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        grammar_backend: GrammarBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self._clock = clock
        self._slots: dict[int, Slot] = {}
        self._num_words = bitmask_words(runner.vocab_size)
        self._grammars = (
            None if grammar_backend is None else GrammarThreads(grammar_backend, self._num_words, clock=clock)
        )

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
        started, begin = time.time(), self._clock()
        self._copy(batch)
        for record in batch.begins:
            self._begin(record)
        num_rows = len(unpack_i32(batch.slots))
        outcomes = [RowOutcome() for _ in range(num_rows)]
        failures: list[RowFailure] = []
        rows = self._plan(batch, outcomes, failures)
        prompt_logprobs: list[PromptLogprobs] = []
        forwarded = self._clock()
        if rows:
            masks = self._masks_ahead(rows)
            logits = self.runner.forward(pack(rows, self.runner.page_size))
            for row in rows:
                row.slot.computed_len += row.length
            forwarded = self._clock()
            if masks is not None:
                masks.result()
            self._sample(logits, rows, outcomes, failures)
            prompt_logprobs = self._prompt_logprobs(logits, rows)
        for slot in unpack_i32(batch.ends):
            self._end(int(slot))
        return StepResult(
            epoch=batch.epoch,
            step=batch.step,
            num_ids=pack_i32([len(outcome.ids) for outcome in outcomes]),
            ids=pack_i32([token for outcome in outcomes for token in outcome.ids]),
            flags=bytes(outcome.flags for outcome in outcomes),
            logprobs=pack_f32([value for outcome in outcomes for value in outcome.logprobs]),
            top_logprobs=[top for outcome in outcomes for top in outcome.top],
            prompt_logprobs=prompt_logprobs,
            failures=failures,
            started=started,
            forward_s=forwarded - begin,
            sample_s=self._clock() - forwarded,
            idle_s=idle_s,
        )

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

    def _plan(self, batch: ForwardBatch, outcomes: list[RowOutcome], failures: list[RowFailure]) -> list[Row]:
        """The rows that compute something; page tables grow for all."""
        new_pages, taken = unpack_i32(batch.new_pages), 0
        rows = []
        columns = (unpack_i32(batch.slots), unpack_i32(batch.num_tokens), unpack_i32(batch.num_new_pages))
        for index, (number, num_tokens, num_pages) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            slot = self._slots.get(number)
            if slot is None:
                raise InvariantError(f"step {batch.step}: row {index} names slot {number}, where no request began")
            slot.pages.extend(new_pages[taken : taken + num_pages])
            taken += num_pages
            if slot.finished:
                outcomes[index].flags |= RowFlag.SKIPPED
                continue
            row = slot.failure or plan_row(index, slot, num_tokens, self.runner.page_size)
            if isinstance(row, str):
                self._fail(failures, index, slot, row)
            else:
                rows.append(row)
        return rows

    @staticmethod
    def _fail(failures: list[RowFailure], index: int, slot: Slot, message: str) -> None:
        """One request cannot go on; its later rows are skipped."""
        slot.finished = True
        failures.append(RowFailure(index, message))

    # ------------------------------------------------------------------ sampling

    def _masks_ahead(self, rows: list[Row]) -> Future[None] | None:
        """Have the masks of the rows that will sample computed during the forward pass; None if there are none.

        A grammar that is still being compiled brings its first mask with it.
        """
        sessions = [row.slot.grammar for row in rows if row.samples and isinstance(row.slot.grammar, MaskAhead)]
        return self._grammars.prepare(sessions) if sessions and self._grammars is not None else None

    def _ready(self, rows: list[Row], failures: list[RowFailure]) -> list[Row]:
        """The rows that can sample now. One whose grammar is not compiled yet is postponed, so that nobody
        waits for it: it gives no id, and its last known id is computed again with its next row."""
        pending = {id(row): row.slot.grammar for row in rows if isinstance(row.slot.grammar, Future)}
        if not pending or self._grammars is None:
            return rows
        self._grammars.wait(list(pending.values()), others=len(pending) < len(rows))
        ready = []
        for row in rows:
            future = pending.get(id(row))
            if future is None or future.done():
                ready.append(row)
            elif words := self._grammars.overdue(future):
                self._fail(failures, row.index, row.slot, f"grammar: {words}")
            else:
                row.slot.computed_len -= 1
        return ready

    def _sample(self, logits: object, rows: list[Row], outcomes: list[RowOutcome], failures: list[RowFailure]) -> None:
        """Draw, or take from the grammar, the next ids of every row that samples."""
        drawn: list[Row] = []
        requests: list[SampleRequest] = []
        for row in self._ready([row for row in rows if row.samples], failures):
            try:
                request = self._request(row, outcomes[row.index])
            except Exception as error:  # the grammar of one request
                raise_if_starved(error)
                self._fail(failures, row.index, row.slot, f"grammar: {error}")
                continue
            if request is not None:
                drawn.append(row)
                requests.append(request)
        if not requests:
            return
        tokens, bad = self.sampler.sample(logits, requests)
        reports: list[tuple[Row, LogprobRequest]] = []
        for row, token, is_bad in zip(drawn, tokens.tolist(), bad.tolist(), strict=True):
            if is_bad:
                message = "the model's logits are not finite, or every token is forbidden"
                self._fail(failures, row.index, row.slot, message)
                continue
            try:
                self._accept(row.slot, token, outcomes[row.index])
            except Exception as error:
                raise_if_starved(error)
                self._fail(failures, row.index, row.slot, f"grammar: {error}")
                outcomes[row.index].ids.clear()
                continue
            k = row.slot.sampling.logprobs
            if k is not None:
                reports.append((row, LogprobRequest(row.sample_logit, token, k)))
        if reports:
            values, tops = self.sampler.logprobs(logits, [request for _, request in reports])
            for (row, report), value, top in zip(reports, values.tolist(), tops, strict=True):
                outcomes[row.index].logprobs.append(value)
                if report.k > 0:
                    outcomes[row.index].top.append(_record(top))

    def _request(self, row: Row, outcome: RowOutcome) -> SampleRequest | None:
        """How to draw the row's next id; None if the grammar forced it and it was appended."""
        slot = row.slot
        session = self._session(slot)
        mask = None
        if session is not None:
            if self._jump_forward(slot, session, outcome):
                return None
            mask = np.empty(self._num_words, np.int32)
            if not session.fill_bitmask(mask):
                mask = None
        return SampleRequest(
            logit_row=row.sample_logit,
            params=slot.sampling,
            index=slot.num_outputs,
            ids=slot.ids.view(),
            prompt_len=slot.prompt_len,
            end_ids=slot.end_ids,
            mask=mask,
        )

    def _accept(self, slot: Slot, token: int, outcome: RowOutcome) -> None:
        """Append a drawn id, and what the grammar forces after it."""
        session = self._session(slot)
        if session is not None:
            session.accept_token(token)
        outcome.ids.append(token)
        slot.append_output(token)
        if session is not None:
            self._jump_forward(slot, session, outcome)

    def _jump_forward(self, slot: Slot, session: GrammarSession, outcome: RowOutcome) -> bool:
        """Append forced ids as far as pages and max_tokens reach (the first one needs no page yet). True if any was.

        A request that wants log-probabilities gets none: a forced id's would need logits that were
        never computed, so its ids are drawn under the mask one by one.
        """
        before = len(outcome.ids)
        if not slot.finished and slot.sampling.logprobs is None:
            capacity = slot.capacity(self.runner.page_size)
            for token in session.forced_tokens():
                if slot.finished or (outcome.ids and slot.num_known >= capacity):
                    break
                session.accept_token(token)
                outcome.ids.append(token)
                slot.append_output(token)
        self._note_grammar(slot, session, outcome)
        return len(outcome.ids) > before

    @staticmethod
    def _note_grammar(slot: Slot, session: GrammarSession, outcome: RowOutcome) -> None:
        outcome.flags &= ~RowFlag.IN_TOOL_CALL
        if session.in_tool_call():
            outcome.flags |= RowFlag.IN_TOOL_CALL
        if outcome.ids and session.is_complete():
            outcome.flags |= RowFlag.GRAMMAR_END
            slot.finished = True

    @staticmethod
    def _session(slot: Slot) -> GrammarSession | None:
        """The slot's session, waiting for its compilation if need be; raises what compiling raised."""
        if isinstance(slot.grammar, Future):
            slot.grammar = slot.grammar.result()
        return slot.grammar

    # ------------------------------------------------------------------ prompt log-probabilities

    def _prompt_logprobs(self, logits: object, rows: list[Row]) -> list[PromptLogprobs]:
        out = []
        for row in rows:
            if row.prompt_rows == 0:
                continue
            k = row.slot.sampling.prompt_logprobs or 0
            targets = row.slot.ids.view()[row.start + 1 : row.start + 1 + row.prompt_rows].tolist()
            requests = [LogprobRequest(row.first_logit + i, token, k) for i, token in enumerate(targets)]
            values, tops = self.sampler.logprobs(logits, requests)
            records = [_record(top) for top in tops] if k > 0 else []
            out.append(PromptLogprobs(row.index, row.start + 1, pack_f32(values), records))
        return out


def _record(top: TopTokens) -> TopLogprobs:
    return TopLogprobs(pack_i32(top.ids), pack_f32(top.logprobs))
