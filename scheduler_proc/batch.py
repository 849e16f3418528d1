"""The next batch: which rows run, and on which pages.

Decoding rows first, each for the one token (or the forced tokens) the worker knows by then; then the
prompts that were left half computed; then waiting requests in the policy's order, under the budget of
prefill tokens and as far as pages and the admission estimate allow. A request that has output, and was
preempted or outlived a process, goes before the prompts of those that never ran.
"""

from __future__ import annotations

from array import array

from common.messages import Finish, ForwardBatch
from scheduler_proc import wide
from scheduler_proc.admission import Admission
from scheduler_proc.admit import Admitter, Verdict
from scheduler_proc.cost import Budget
from scheduler_proc.draft import Draft
from scheduler_proc.life import Life
from scheduler_proc.policy import Policy
from scheduler_proc.preempt import pages_coming, pages_given, victims
from scheduler_proc.request import Req, Status
from scheduler_proc.slots import FEW, SlotTable
from scheduler_proc.state import Pool, State

MOST_WAITS = 64
"""Requests that wait for somebody's prefix passed over in one step; bounds the step's time."""


class Batcher:
    """Builds batches. Everything it allocates is in the batch it returns."""

    def __init__(self, state: State, life: Life, admission: Admission, policy: Policy) -> None:
        self.state = state
        self.life = life
        self.admission = admission
        self.policy = policy
        self.admitter = Admitter(state, life, admission)
        self.stuck: Req | None = None
        """Who was first in the queue and did not fit, in the last batch that was tried."""
        self.depth = 1 if state.config.scheduler.disable_overlap_schedule else 2

    @property
    def has_room(self) -> bool:
        """Fewer batches are in flight than may be."""
        pool = self.state.pool
        return pool is not None and len(pool.in_flight) < self.depth

    @property
    def send_at(self) -> float:
        """When the next batch is to be built: -inf for at once, inf while enough are in flight."""
        pool = self.state.pool
        if pool is None or not self.has_room:
            return float("inf")
        return self.state.pacing.send_at(pool.in_flight, self.state.cost)

    def next_batch(self, now: float) -> ForwardBatch | None:
        """One batch, or None: no worker, enough in flight, or nothing can run."""
        state = self.state
        pool = state.pool
        if pool is None or not self.has_room:
            return None
        if now < self.send_at:
            state.pacing.holding = True
            return None
        draft = Draft(pool)
        if state.suspects:
            if pool.in_flight:
                return None  # one suspect at a time, so that a crash names it
            self._quarantine(draft, now)
        if not state.suspects:
            self._make_way()
            self._decode(draft, pool.table.decoding_slots())
            self._prefill(draft, now)
        batch = draft.seal(state.epoch, state.step + 1)
        if batch is not None:
            state.step += 1
            state.pacing.sent(state.step, len(pool.in_flight), now)
        return batch

    # ------------------------------------------------------------------ decoding rows

    def _decode(self, draft: Draft, slots: array[int]) -> None:
        """Add a row for each of these slots that may still generate and has, or gets, its page."""
        pool, table = draft.pool, draft.pool.table
        rows_of = wide.decoding_rows if len(slots) > FEW else decoding_rows
        rows, wishing, needy = rows_of(table, slots)
        if needy and not pool.ensure(len(needy)):
            left_out = set(self._make_room(draft, needy))

            def stays(slot: int) -> bool:
                return bool(table.decoding[slot]) and slot not in left_out

            rows = array("i", filter(stays, rows))
            wishing, needy = list(filter(stays, wishing)), list(filter(stays, needy))
        draft.decode_slots = rows
        if wishing:
            self._add_pages(draft, wishing, needy)

    def _add_pages(self, draft: Draft, wishing: list[int], needy: list[int]) -> None:
        """One page for each row that must have it; for rows with headroom as much of it as is free."""
        pool, table = draft.pool, draft.pool.table
        pages = pool.allocator.alloc(len(needy))
        given = dict(zip(needy, () if pages is None else pages.tolist(), strict=True))
        for slot in wishing:
            req = table.reqs[slot]
            assert req is not None  # a decoding slot is taken
            new = [given[slot]] if slot in given else []
            if table.headroom[slot]:
                expected = table.known[slot] + table.sampling[slot]
                goal = min(expected + table.headroom[slot], table.limit[slot])
                short = pool.pages_for(goal) - len(req.pages) - len(new)
                spare = pool.allocator.alloc(short) if short > 0 and pool.ensure(short) else None
                new += [] if spare is None else spare.tolist()
            if new:
                req.pages += new
                draft.new_pages += new
                draft.num_new_pages[slot] = len(new)
                table.capacity[slot] += len(new) * pool.page_size

    def _make_room(self, draft: Draft, needy: list[int]) -> list[int]:
        """Preempt until the rows that need a page have one, now or once what is in flight returns.

        Returns the slots that get none in this batch.
        """
        pool, table = draft.pool, draft.pool.table
        order = victims(pool)
        if len(order) == 1 and not pool.in_flight:
            self._outgrew(order[0])
            return needy
        wanted = set(needy)
        coming = pages_coming(pool)
        for victim in order[:-1]:
            if pool.ensure(len(wanted)) or pool.allocator.num_free + coming >= len(wanted):
                break
            wanted.discard(victim.slot)
            if table.rows[victim.slot]:
                coming += pages_given(pool, victim)
            if not draft.preempted:
                self.admission.preempted(pool)
            draft.preempted = True
            self.life.preempt(victim, "the pool is full and it has generated least")
        pool.ensure(len(wanted))
        best_first = [req.slot for req in reversed(order) if req.slot in wanted]
        return best_first[pool.allocator.num_free :]

    def _outgrew(self, req: Req) -> None:
        pool = self.state.need_pool()
        words = (
            f"the request alone filled the KV cache ({pool.max_tokens} tokens) and was cut short;"
            " raise --max-total-tokens or --mem-fraction-static"
        )
        self.state.log.append(("warning", f"{req.rid}: {words}"))
        self.life.finish(req, Finish("length", message=words))

    # ------------------------------------------------------------------ prefill rows

    def _prefill(self, draft: Draft, now: float) -> None:
        """Continue the half-computed prompts and admit who fits: first those with output, whose streams pause, then
        those that never ran, so that a long prompt of theirs holds no stream up."""
        pool = draft.pool
        budget = self._budget(pool, len(draft.decode_slots))
        if not any(pool.table.running):
            self.admission.idle()
        for resumed in (True, False):
            self._continue(draft, budget, resumed=resumed)
            if self.state.queue.has_resumed or not resumed:
                self._admit(draft, now, budget, resumed=resumed)

    def _budget(self, pool: Pool, num_decode_rows: int) -> Budget:
        configured = self.state.config.scheduler.chunked_prefill_size
        return Budget(configured, self.state.cost, num_decode_rows, pool.page_size, pool.tile_tokens)

    def _continue(self, draft: Draft, budget: Budget, *, resumed: bool) -> None:
        """Chunks for those that are half computed and have output, or have none."""
        table = draft.pool.table
        reqs = [req for req in table.half_computed() if (table.known[req.slot] > req.prompt_len) == resumed]
        for req in sorted(reqs, key=lambda req: req.seq):
            self.admitter.add_chunk(draft, req, budget)

    def _admit(self, draft: Draft, now: float, budget: Budget, *, resumed: bool) -> None:
        """Admit in the policy's order, until one does not fit; ``resumed``: or has no output."""
        queue, pool = self.state.queue, draft.pool
        if draft.preempted or self.stuck is not None or budget.spent or not queue:
            return
        if not self.policy.preempts and not self.admitter.has_slot:
            return
        num_waits = 0
        for req in self.policy.order(queue, pool.tree, now):
            if resumed and not req.has_output:
                break
            verdict = self.admitter.admit(draft, req, now)
            if verdict is Verdict.ADMITTED:
                self.admitter.add_chunk(draft, req, budget)
            elif verdict is Verdict.FULL:
                self.stuck = req
                break
            num_waits += verdict is Verdict.WAITS
            if budget.spent or num_waits > MOST_WAITS:
                break

    def _make_way(self) -> None:
        """Preempt the lowest for the request that was stuck at the head of the queue, if it outranks it.

        One at a time, and none while another is on its way out. Before any row is drafted, so that no row
        of the victim is.
        """
        req, self.stuck = self.stuck, None
        pool = self.state.need_pool()
        if not self.policy.preempts or req is None or req.status is not Status.WAITING:
            return
        if any(other.status in (Status.LEAVING, Status.ENDING) for other in pool.table.taken()):
            return
        threshold = self.state.config.scheduler.priority_preemption_threshold
        lower = [v for v in victims(pool) if req.spec.priority - v.rank > threshold and not v.in_tool_call]
        if lower:
            self.life.preempt(lower[0], f"{req.rid} does not fit and has a priority of {req.spec.priority}")

    # ------------------------------------------------------------------ after a crash

    def _quarantine(self, draft: Draft, now: float) -> None:
        """A batch of one row: the first suspect that has not passed the position it crashed at."""
        pool = draft.pool
        for rid in list(self.state.suspects):
            req = self.state.reqs[rid]
            if req.status is Status.WAITING and not self._admit_alone(draft, req, now):
                continue  # it can no longer fit, and has ended
            if pool.table.decoding[req.slot]:
                self._decode(draft, array("i", [req.slot]))
            else:
                self.admitter.add_chunk(draft, req, self._budget(pool, 0))
            return

    def _admit_alone(self, draft: Draft, req: Req, now: float) -> bool:
        """Admit a suspect whatever it takes; nothing is in flight, so a preempted request's pages come at once."""
        while (verdict := self.admitter.admit(draft, req, now, alone=True)) is Verdict.FULL:
            self.life.preempt(victims(draft.pool)[0], f"{req.rid} must run alone: the worker died while it ran")
        return verdict is Verdict.ADMITTED


def decoding_rows(table: SlotTable, slots: array[int]) -> tuple[array[int], list[int], list[int]]:
    """Of these decoding slots: those that may still generate, those of them that want pages (some in advance: rows
    that may get several ids in a step), and those that cannot run without one."""
    known, sampling, limit = table.known, table.sampling, table.limit
    headroom, capacity = table.headroom, table.capacity
    rows, wishing, needy = array("i"), [], []
    for slot in slots:
        expected = known[slot] + sampling[slot]
        if expected < limit[slot]:
            rows.append(slot)
            if min(expected + headroom[slot], limit[slot]) > capacity[slot]:
                wishing.append(slot)
                if expected > capacity[slot]:
                    needy.append(slot)
    return rows, wishing, needy
