"""What the result of a step means for each of its rows.

Rows that sampled one id and want nothing else are handled as columns; Python looks at a row only when
it ends, when it is a prefill chunk, or when its ids come with log-probabilities or from a grammar.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantError
from common.messages import (
    Finish,
    PromptLogprobs,
    RowFlag,
    StepResult,
    TopLogprobs,
    unpack_f32,
    unpack_i32,
)
from scheduler_proc.admission import Admission
from scheduler_proc.admit import prefix_key
from scheduler_proc.life import Life
from scheduler_proc.request import Req, Status
from scheduler_proc.state import InFlight, Pool, State

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Commit:
    """Applies StepResults, in the order in which the batches were sent."""

    def __init__(self, state: State, life: Life, admission: Admission) -> None:
        self.state = state
        self.life = life
        self.admission = admission

    def result(self, message: StepResult) -> None:
        """Apply one result; one of another epoch is dropped.

        Raises InvariantError when it answers another batch than the oldest in flight.
        """
        pool = self.state.pool
        if pool is None or message.epoch != self.state.epoch:
            return
        flight = self._oldest(pool, message)
        slots = flight.slots
        num_ids, ids = unpack_i32(message.num_ids), unpack_i32(message.ids)
        flags = np.frombuffer(message.flags, dtype=np.uint8)
        if not len(num_ids) == len(flags) == len(slots):
            raise InvariantError(f"step {message.step}: {len(slots)} rows sent, {len(num_ids)} came back")
        pool.table.rows[slots] -= 1
        pool.table.sampling[slots] -= flight.sampling
        for page in flight.copied_pages:
            pool.allocator.release([page])
        self._count(message, flight)
        starts = np.cumsum(num_ids) - num_ids
        self._note_computed(pool, flight, num_ids)
        for failure in message.failures:
            self._fail(pool, slots, failure.row, failure.message)
        for chunk in message.prompt_logprobs:
            self._prompt_logprobs(pool, slots, chunk)
        plain = (num_ids == 1) & pool.table.plain[slots] & (flags == 0)
        self._slow_rows(pool, flight, (~plain).nonzero()[0], num_ids, ids, starts, flags, message)
        self._plain_rows(pool, slots[plain], ids[starts[plain]])
        self._after_chunks(pool, flight)
        self._acquit(pool, slots)
        for slot in slots[(pool.table.rows[slots] == 0) & ~pool.table.running[slots]].tolist():
            req = pool.table.reqs[slot]
            if req is not None:
                self.life.settle(req)

    def _oldest(self, pool: Pool, message: StepResult) -> InFlight:
        if not pool.in_flight or pool.in_flight[0].step != message.step:
            expected = pool.in_flight[0].step if pool.in_flight else None
            raise InvariantError(f"result of step {message.step} arrived; step {expected} is the oldest in flight")
        return pool.in_flight.popleft()

    def _count(self, message: StepResult, flight: InFlight) -> None:
        state, num_prefill = self.state, int(flight.chunks.sum())
        num_decode = int(np.count_nonzero(flight.chunks == 0))
        duration_s = message.forward_s + message.sample_s
        state.metrics.num_prefill_tokens_total += num_prefill
        if flight.slots.size:
            state.metrics.num_steps_total += 1
            state.metrics.step_time.observe(duration_s)
            state.cost.observe(duration_s, num_prefill, num_decode)
        if num_decode:
            self.admission.went_well()

    @staticmethod
    def _note_computed(pool: Pool, flight: InFlight, num_ids: I32) -> None:
        """A row that sampled has computed every id known before; a chunk that did not, its own ids."""
        table, slots = pool.table, flight.slots
        sampled = num_ids > 0
        table.computed[slots[sampled]] = table.known[slots[sampled]]
        chunk = ~sampled & (flight.chunks > 0)
        table.computed[slots[chunk]] += flight.chunks[chunk]

    # ------------------------------------------------------------------ rows

    def _plain_rows(self, pool: Pool, slots: I32, tokens: I32) -> None:
        table = pool.table
        table.ids[slots, table.known[slots]] = tokens
        table.known[slots] += 1
        self.state.metrics.generation_tokens_total += int(slots.size)
        stopped = (table.stop[slots] == tokens[:, None]).any(axis=1)
        ended = stopped | (table.known[slots] >= table.limit[slots])
        for i in ended.nonzero()[0].tolist():
            req = table.reqs[int(slots[i])]
            assert req is not None  # a slot with a row in flight is taken
            self.life.finish(req, Finish("stop", int(tokens[i])) if stopped[i] else Finish("length"))

    def _slow_rows(self, pool: Pool, flight: InFlight, rows: NDArray[np.intp], num_ids: I32, ids: I32, starts: I32,
                   flags: U8, message: StepResult) -> None:  # fmt: skip
        """Rows with log-probabilities, grammars, many stop ids, flags, or whose request has ended."""
        logprobs = unpack_f32(message.logprobs)
        at = at_top = 0
        for row in rows.tolist():
            req = pool.table.reqs[int(flight.slots[row])]
            if req is None:
                continue  # its row failed, and it is gone already
            n = int(num_ids[row])
            sampling = req.spec.sampling
            top: list[TopLogprobs] = []
            values: list[float] = []
            if sampling.logprobs is not None and n:
                values = logprobs[at : at + n].tolist()
                at += n
                if sampling.logprobs > 0:
                    top = message.top_logprobs[at_top : at_top + n]
                    at_top += n
            if req.finish is None:
                tokens = ids[int(starts[row]) : int(starts[row]) + n].tolist()
                self._extend(pool, req, tokens, values, top, int(flags[row]))

    def _extend(self, pool: Pool, req: Req, tokens: list[int], values: list[float], top: list[TopLogprobs],
                flags: int) -> None:  # fmt: skip
        """Append ids one by one until one of them ends the request."""
        table, slot = pool.table, req.slot
        req.in_tool_call = bool(flags & RowFlag.IN_TOOL_CALL)
        if tokens and req.accepted:
            self.state.loose[req.rid] = req
        for i, token in enumerate(tokens):
            if table.known[slot] >= table.limit[slot]:
                break
            table.append(req, token)
            self.state.metrics.generation_tokens_total += req.counted
            if req.logprobs is not None:
                req.logprobs.append(values[i])
                req.top_logprobs += top[i : i + 1]
            if token in req.stop_ids:  # before min_tokens the worker does not sample one
                self.life.finish(req, Finish("stop", token))
                return
        if flags & RowFlag.GRAMMAR_END:
            self.life.finish(req, Finish("stop"))
        elif flags & RowFlag.SKIPPED:
            # The row that told of the end came before this one; without it nothing would ever come again.
            self.life.fail(req, 500, "the worker ended this request and did not say why", code="row_skipped")
        elif table.known[slot] >= table.limit[slot] and (tokens or table.computed[slot] >= table.known[slot]):
            self.life.finish(req, Finish("length"))

    def _fail(self, pool: Pool, slots: I32, row: int, words: str) -> None:
        req = pool.table.reqs[int(slots[row])]
        if req is not None and req.finish is None:
            self.life.fail(req, 500, words, code="row_failed")

    def _prompt_logprobs(self, pool: Pool, slots: I32, chunk: PromptLogprobs) -> None:
        """Collect one chunk. Positions already there (recomputed after a preemption) are counted once."""
        req = pool.table.reqs[int(slots[chunk.row])]
        if req is None or req.prompt_logprobs is None or req.finish is not None:
            return
        values = unpack_f32(chunk.logprobs)
        begin = chunk.start - 1
        total = len(req.prompt_logprobs)
        done = total - req.prompt_logprobs_left
        end = begin + len(values)
        if begin > done or end > total:
            raise InvariantError(f"{req.rid}: prompt log-probabilities [{begin}, {end}) of {total}; {done} were there")
        req.prompt_logprobs[begin:end] = values
        if req.prompt_top:
            req.prompt_top[begin:end] = chunk.top
        req.prompt_logprobs_left = total - max(done, end)
        if req.prompt_logprobs_left == 0 and len(pool.table.known_ids(req)) >= req.max_len:
            self.life.finish(req, Finish("length"))  # no tokens were asked for

    # ------------------------------------------------------------------ afterwards

    def _after_chunks(self, pool: Pool, flight: InFlight) -> None:
        """Prompts, as far as they are computed, enter the tree; who waits for a prefix is told how far it is."""
        table, size = pool.table, pool.page_size
        for row in flight.chunks.nonzero()[0].tolist():
            req = table.reqs[int(flight.slots[row])]
            if req is None or req.status is not Status.RUNNING:
                continue
            self.life.keep_in_tree(req)
            if req.pending_key is None:
                continue
            self.life.leave_prefix(req)
            if flight.sampling[row]:
                continue
            key = prefix_key(pool, req, table.known_ids(req).tobytes(), req.tree_len // size)
            if key is not None and key not in self.state.pending_prefixes:
                self.state.pending_prefixes[key] = req
                req.pending_key = key

    def _acquit(self, pool: Pool, slots: I32) -> None:
        """Suspects that have passed the position at which a worker died are free to run with others."""
        suspects = self.state.suspects
        if not suspects:
            return
        for slot in slots.tolist():
            req = pool.table.reqs[slot]
            if req is not None and int(pool.table.computed[slot]) >= suspects.get(req.rid, 1 << 60):
                del suspects[req.rid]
                req.crashes = 0
