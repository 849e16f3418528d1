"""What the result of a step means for each of its rows.

Rows that sampled and want nothing else are handled in one short loop; more is done for a row only
when it ends, when it is a prefill chunk, or when its ids come with log-probabilities or from a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvariantError
from common.messages import (
    Finish,
    PromptLogprobs,
    RowFlag,
    StepResult,
    TopLogprobs,
    unpack_f32,
    unpack_ints,
)
from scheduler_proc import wide
from scheduler_proc.admission import Admission
from scheduler_proc.admit import prefix_key
from scheduler_proc.life import Life
from scheduler_proc.request import Req, Status
from scheduler_proc.slots import FEW, SlotTable
from scheduler_proc.state import InFlight, Pool, State

Span = tuple[int, int, int]
"""(row, its first id in ``StepResult.ids``, how many it has)."""


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
        slots, num_rows = flight.slots, len(message.num_ids) // 4
        if not num_rows == len(message.flags) == len(slots):
            raise InvariantError(f"step {message.step}: {len(slots)} rows sent, {num_rows} came back")
        note_computed = wide.note_computed if len(slots) > FEW else self._note_computed
        note_computed(pool.table, flight, message.num_ids)
        for page in flight.copied_pages:
            pool.allocator.release([page])
        self._count(pool, message, flight)
        reqs = [pool.table.reqs[slot] for slot in slots]  # some end here, and their rows still have numbers of theirs
        for failure in message.failures:
            self._fail(pool, slots, failure.row, failure.message)
        for chunk in message.prompt_logprobs:
            self._prompt_logprobs(pool, slots, chunk)
        self._append(pool.table, flight, message, reqs)
        self._after_chunks(pool, flight)
        self._acquit(pool, slots)
        rows, running = pool.table.rows, pool.table.running
        for slot in slots:
            if not running[slot] and not rows[slot] and (req := pool.table.reqs[slot]) is not None:
                self.life.settle(req)

    def _oldest(self, pool: Pool, message: StepResult) -> InFlight:
        if not pool.in_flight or pool.in_flight[0].step != message.step:
            expected = pool.in_flight[0].step if pool.in_flight else None
            raise InvariantError(f"result of step {message.step} arrived; step {expected} is the oldest in flight")
        return pool.in_flight.popleft()

    def _count(self, pool: Pool, message: StepResult, flight: InFlight) -> None:
        state, num_prefill, num_decode = self.state, flight.num_prefill_tokens, flight.num_decode
        duration_s = message.forward_s + message.sample_s
        state.metrics.num_prefill_tokens_total += num_prefill
        if flight.slots:
            state.metrics.num_steps_total += 1
            state.metrics.step_time.observe(duration_s)
            if message.num_drafts:
                state.metrics.drafted(unpack_ints(message.num_drafts), unpack_ints(message.num_ids))
            state.cost.observe(duration_s, num_prefill, num_decode, flight.mean_context, pool.tile_tokens)
        if num_decode:
            self.admission.went_well()

    @staticmethod
    def _note_computed(table: SlotTable, flight: InFlight, num_ids: bytes) -> None:
        """The rows are no longer in flight. One that sampled has computed every id known before; a chunk that did
        not, its own ids."""
        rows, sampling, computed, known = table.rows, table.sampling, table.computed, table.known
        columns = zip(flight.slots, flight.samples, flight.chunks, unpack_ints(num_ids), strict=True)
        for slot, sample, chunk, n in columns:
            rows[slot] -= 1
            sampling[slot] -= sample
            computed[slot] = known[slot] if n else computed[slot] + chunk

    # ------------------------------------------------------------------ rows

    def _append(
        self, table: SlotTable, flight: InFlight, message: StepResult, reqs: Sequence[Req | None]
    ) -> None:
        """Each row's new ids to its request, whose end they may be."""
        append = wide.append_plain if len(flight.slots) > FEW else append_plain
        num_plain, ended, others = append(table, flight.slots, message)
        self.state.metrics.generation_tokens_total += num_plain
        if others:
            self._slow_rows(table, reqs, others, message)
        for slot, token in ended:
            req = table.reqs[slot]
            assert req is not None  # a slot with a row in flight is taken
            self.life.finish(req, Finish("stop", token) if token in req.stop_ids else Finish("length"))

    def _slow_rows(
        self, table: SlotTable, reqs: Sequence[Req | None], rows: list[Span], message: StepResult
    ) -> None:
        """Rows with log-probabilities, grammars, many stop ids, flags, or whose request has ended."""
        ids, logprobs = unpack_ints(message.ids), unpack_f32(message.logprobs)
        at = at_top = 0
        for row, start, n in rows:
            req = reqs[row]
            if req is None:
                continue
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
                self._extend(table, req, ids[start : start + n], values, top, message.flags[row])

    def _extend(self, table: SlotTable, req: Req, tokens: Sequence[int], values: list[float], top: list[TopLogprobs],
                flags: int) -> None:  # fmt: skip
        """Append ids one by one until one of them ends the request."""
        slot = req.slot
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

    def _fail(self, pool: Pool, slots: Sequence[int], row: int, words: str) -> None:
        req = pool.table.reqs[slots[row]]
        if req is not None and req.finish is None:
            self.life.fail(req, 500, words, code="row_failed")

    def _prompt_logprobs(self, pool: Pool, slots: Sequence[int], chunk: PromptLogprobs) -> None:
        """Collect one chunk. Positions already there (recomputed after a preemption) are counted once."""
        req = pool.table.reqs[slots[chunk.row]]
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
        if req.prompt_logprobs_left == 0 and pool.table.known_len(req) >= req.max_len:
            self.life.finish(req, Finish("length"))  # no tokens were asked for

    # ------------------------------------------------------------------ afterwards

    def _after_chunks(self, pool: Pool, flight: InFlight) -> None:
        """Prompts, as far as they are computed, enter the tree; who waits for a prefix is told how far it is."""
        table, size = pool.table, pool.page_size
        for slot, samples in zip(flight.slots[flight.num_decode :], flight.samples[flight.num_decode :], strict=True):
            req = table.reqs[slot]
            if req is None or req.status is not Status.RUNNING:
                continue
            self.life.keep_in_tree(req)
            if req.pending_key is None:
                continue
            self.life.leave_prefix(req)
            if samples:
                continue
            key = prefix_key(pool, req, table.ids_up_to(slot, table.known[slot]), req.tree_len // size)
            if key is not None and key not in self.state.pending_prefixes:
                self.state.pending_prefixes[key] = req
                req.pending_key = key

    def _acquit(self, pool: Pool, slots: Sequence[int]) -> None:
        """Suspects that have passed the position at which a worker died are free to run with others."""
        suspects = self.state.suspects
        if not suspects:
            return
        for slot in slots:
            req = pool.table.reqs[slot]
            if req is not None and pool.table.computed[slot] >= suspects.get(req.rid, 1 << 60):
                del suspects[req.rid]
                req.crashes = 0


def append_plain(
    table: SlotTable, slots: Sequence[int], message: StepResult
) -> tuple[int, list[tuple[int, int]], list[Span]]:
    """Append the ids of rows that sampled and want nothing else. Returns how many ids these are, the (slot, id)
    of those that ended with one, and the rows that are left."""
    plain, reqs = table.plain, table.reqs
    ids = unpack_ints(message.ids)
    at = num_appended = 0
    ended: list[tuple[int, int]] = []
    others: list[Span] = []
    for row, (slot, n, flags) in enumerate(zip(slots, unpack_ints(message.num_ids), message.flags, strict=True)):
        req = reqs[slot]
        if n and plain[slot] and not flags and req is not None:
            added, at_end = table.append_until_end(slot, ids[at : at + n], req.stop_ids)
            num_appended += added
            if at_end:
                ended.append((slot, ids[at + added - 1]))
        else:
            others.append((row, at, n))
        at += n
    return num_appended, ended, others
