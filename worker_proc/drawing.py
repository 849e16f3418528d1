"""From a step's logits to the next ids of its requests: what is drawn, what grammars force, what is reported.

In two halves: ``begin`` launches the drawing, ``see`` takes its ids (``launched.py`` says what is between them).
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from common.errors import raise_if_starved
from common.messages import PromptLogprobs, RowFlag, TopLogprobs, pack_f32, pack_i32
from worker_proc.grammar.overlap import GrammarThreads, MaskAhead
from worker_proc.grammar_protocol import GrammarSession, bitmask_words
from worker_proc.launched import LaunchedStep, RowOutcome
from worker_proc.packing import Row
from worker_proc.runner import ModelRunner
from worker_proc.sampling.request import AheadSampler, LogprobRequest, SampleRequest, TopTokens
from worker_proc.slots import Slot


class Drawing:
    """Draws for one executor. ``grammars`` is None where constrained decoding is off."""

    def __init__(self, runner: ModelRunner, sampler: AheadSampler, grammars: GrammarThreads | None) -> None:
        self._sampler = sampler
        self._grammars = grammars
        self._page_size = runner.page_size
        self._num_words = bitmask_words(runner.vocab_size)

    def masks_ahead(self, rows: list[Row]) -> Future[None] | None:
        """Have the masks of the rows that will sample computed during the forward pass; None if there are none.

        A grammar that is still being compiled brings its first mask with it.
        """
        sampling = (row.slot for row in rows if row.samples and not row.slot.finished)
        sessions = [slot.grammar for slot in sampling if isinstance(slot.grammar, MaskAhead)]
        return self._grammars.prepare(sessions) if sessions and self._grammars is not None else None

    @staticmethod
    def _is_open(row: Row, step: LaunchedStep) -> bool:
        """Whether the row can still draw, after what the step before it gave once this one was launched: not if the
        request has ended, nor if ids were forced that are not computed. Those may not be given now: to the scheduler
        a row that gives ids has computed all that were known."""
        slot = row.slot
        if slot.finished:
            step.outcomes[row.index].flags |= RowFlag.SKIPPED
            return False
        if row.start + row.length - row.num_drafts == slot.num_known:
            return True
        if isinstance(slot.grammar, MaskAhead) and slot.grammar.in_tool_call():
            step.outcomes[row.index].flags |= RowFlag.IN_TOOL_CALL
        return False

    def _ready(self, rows: list[Row], step: LaunchedStep) -> list[Row]:
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
                step.fail(row.index, row.slot, f"grammar: {words}")
            else:
                row.slot.computed_len -= 1
        return ready

    def begin(self, step: LaunchedStep) -> None:
        """Launch the drawing of the next id of every row that samples, and of one after each of its drafts; forced ids
        are appended at once."""
        if step.masks is not None:
            step.masks.result()
        requests: list[SampleRequest] = []
        for row in self._ready([row for row in step.rows if row.samples and self._is_open(row, step)], step):
            try:
                wanted = self._requests(row, step.outcomes[row.index])
            except Exception as error:  # the grammar of one request
                raise_if_starved(error)
                step.fail(row.index, row.slot, f"grammar: {error}")
                continue
            if wanted:
                row.slot.drawn_at = len(requests)
                step.drawn_rows.append(row)
                requests += wanted
        if requests:
            step.drawn = self._sampler.begin(step.logits, requests)
        elif step.rows and step.reports is None:
            step.reports = self._sampler.begin_logprobs(step.logits, [])  # to tell when the forward pass has ended
        for row in step.drawn_rows:
            row.slot.unseen += 1

    def see(self, step: LaunchedStep) -> None:
        """Wait for the ids of ``begin``, append them to their requests, and what grammars force after them."""
        if step.drawn is None:
            return
        tokens, bad = step.drawn.wait()
        for row in step.drawn_rows:
            row.slot.unseen -= 1
        place = 0
        for row in step.drawn_rows:
            self._see_row(row, tokens[place : place + row.num_drafts + 1].tolist(), bad, place, step)
            place += row.num_drafts + 1

    def _see_row(self, row: Row, tokens: list[int], bad: NDArray[np.bool_], place: int, step: LaunchedStep) -> None:
        """Append what was drawn after the row's known ids and, as far as they were right, after its drafts."""
        assert step.drawn is not None
        slot, outcome = row.slot, step.outcomes[row.index]
        for number, token in enumerate(tokens):
            if not self._take(row, token, bool(bad[place + number]), step):
                break
            if slot.sampling.logprobs is not None:
                value, top = step.drawn.report(place + number)
                outcome.logprobs.append(float(value))
                if slot.sampling.logprobs > 0:
                    outcome.top.append(_record(top))
            if slot.finished or (number < row.num_drafts and token != row.proposal[number]):
                break
        if row.num_drafts:
            slot.computed_len = slot.ids.size - 1  # drafts that were wrong are no part of it

    def _take(self, row: Row, token: int, is_bad: bool, step: LaunchedStep) -> bool:
        """Append a drawn id to its request, and what its grammar forces after it. Whether it was fit."""
        outcome = step.outcomes[row.index]
        if row.slot.finished:  # by the step before, whose id was not seen when this one was drawn
            outcome.flags |= RowFlag.SKIPPED
            return False
        if is_bad:
            step.fail(row.index, row.slot, "the model's logits are not finite, or every token is forbidden")
            return False
        try:
            self._accept(row.slot, token, outcome)
        except Exception as error:
            raise_if_starved(error)
            step.fail(row.index, row.slot, f"grammar: {error}")
            outcome.ids.clear()
            return False
        return True

    def _requests(self, row: Row, outcome: RowOutcome) -> list[SampleRequest]:
        """How to draw the row's next id, and one after each of its drafts; none if the grammar forced it and it was
        appended."""
        slot = row.slot
        session = self._session(slot)
        mask = None
        if session is not None:
            if self._jump_forward(slot, session, outcome):
                return []
            mask = np.empty(self._num_words, np.int32)
            if not session.fill_bitmask(mask):
                mask = None
        # Rows with drafts have neither a mask nor penalties, and so do not look at the ids before (``Speculator``).
        first, index, ids = row.sample_logit, slot.num_outputs, slot.ids.view()
        return [
            SampleRequest(first + after, slot.sampling, index + after, ids, slot.prompt_len, slot.end_ids, mask)
            for after in range(row.num_drafts + 1)
        ]

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
            capacity = slot.capacity(self._page_size)
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

    def begin_prompt_logprobs(self, step: LaunchedStep) -> None:
        """Launch the log-probabilities of the prompts' ids, for the rows that want them."""
        requests = [
            LogprobRequest(row.first_logit + i, token, row.slot.sampling.prompt_logprobs or 0)
            for row in step.rows
            if row.prompt_rows
            for i, token in enumerate(row.slot.ids.view()[row.start + 1 : row.start + 1 + row.prompt_rows].tolist())
        ]
        if requests:
            step.reports = self._sampler.begin_logprobs(step.logits, requests)

    @staticmethod
    def prompt_logprobs(step: LaunchedStep) -> list[PromptLogprobs]:
        """Wait for what ``begin_prompt_logprobs`` launched."""
        if step.reports is None:
            return []
        values, tops = step.reports.wait()
        out, at = [], 0
        for row in step.rows:
            if row.prompt_rows:
                own = slice(at, at + row.prompt_rows)
                records = [_record(top) for top in tops[own]] if row.slot.sampling.prompt_logprobs else []
                out.append(PromptLogprobs(row.index, row.start + 1, pack_f32(values[own]), records))
                at += row.prompt_rows
        return out


def _record(top: TopTokens) -> TopLogprobs:
    return TopLogprobs(pack_i32(top.ids), pack_f32(top.logprobs))
