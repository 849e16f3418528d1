"""What the detokenizer has not been told yet, as one TokenBatch.

Each request has a cursor (ids handed over). When the channel is full no batch is made, the cursors stay,
and the next batch carries more. A higher attempt moves the cursor back to the first output.
"""

from __future__ import annotations

from itertools import compress

from common.messages import BeginOutput, TokenBatch, TokenRow, pack_f32
from scheduler_proc import wide
from scheduler_proc.life import Life
from scheduler_proc.request import Req, Status
from scheduler_proc.slots import FEW, SlotTable
from scheduler_proc.state import State


class Output:
    """Makes TokenBatches and moves the cursors."""

    def __init__(self, state: State, life: Life) -> None:
        self.state = state
        self.life = life
        self._held_back = False
        """The last batch named gateways that are gone, and nothing else."""

    def batch(self) -> TokenBatch | None:
        """Everything new; None when nothing is. What it returns counts as handed over."""
        state = self.state
        if state.gone:
            # Alone in its message: a successor of the same name may have begun requests since.
            gone, state.gone = state.gone, []
            self._held_back = True
            return self._message([], [], gone)
        self._held_back = False
        begins = [self._begin(req) for req in state.begins.values()]
        state.begins.clear()
        rows = self._plain_rows()
        loose, state.loose = state.loose, {}
        for req in loose.values():
            row = self._loose_row(req)
            if row is not None:
                rows.append(row)
        if not (begins or rows or state.refused):
            return None
        return self._message(begins, rows, [])

    @property
    def pending(self) -> bool:
        """A batch would not be None (what streams as columns is known only when it is made)."""
        state = self.state
        return bool(self._held_back or state.gone or state.begins or state.loose or state.refused)

    def _message(self, begins: list[BeginOutput], rows: list[TokenRow], gone: list[str]) -> TokenBatch:
        refused = []
        if not gone:
            refused, self.state.refused = self.state.refused, []
        return TokenBatch(
            scheduler_generation=self.state.generation,
            step=self.state.step,
            begins=begins,
            rows=rows,
            refused=refused,
            gone_gateways=gone,
        )

    def _begin(self, req: Req) -> BeginOutput:
        """Start a request's text at the detokenizer, from output 0."""
        req.prompt_logprobs_sent = req.prompt_logprobs is None
        self._set_sent(req, req.prompt_len)
        self.state.loose[req.rid] = req
        sampling = req.spec.sampling
        prompt_ids = req.spec.input_ids if sampling.prompt_logprobs is not None else b""
        return BeginOutput(
            req.rid,
            req.attempt,
            req.gateway,
            req.prompt_len,
            req.cached_len,
            req.spec.text,
            sampling.logprobs,
            prompt_ids,
        )

    def _plain_rows(self) -> list[TokenRow]:
        """New ids of requests that stream and want nothing but ids."""
        pool = self.state.pool
        if pool is None:
            return []
        many = pool.table.streaming.count(1) > FEW
        return wide.new_rows(pool.table) if many else new_rows(pool.table)

    def _loose_row(self, req: Req) -> TokenRow | None:
        """Everything new of one request, its ending included; None when there is nothing."""
        pool = self.state.pool
        if pool is not None and req.slot >= 0:
            ids = pool.table.known_ids(req)
            sent = pool.table.sent_len(req)
        else:
            ids, sent = req.ids, req.sent_len
        prompt_due = not req.prompt_logprobs_sent and req.prompt_logprobs_left == 0
        if not req.prompt_logprobs_sent and not prompt_due and req.finish is None:
            return None  # the first row carries them; there are no ids before they are complete
        self._stream_from_now_on(req)
        if len(ids) == sent and req.finish is None and not prompt_due:
            return None
        a, b = sent - req.prompt_len, len(ids) - req.prompt_len
        self._set_sent(req, len(ids))
        if req.finish is not None:
            req.finish_handed = True
            self.life.forget(req)
        prompt_values = b""
        if prompt_due and req.prompt_logprobs is not None:
            req.prompt_logprobs_sent = True
            prompt_values = pack_f32(req.prompt_logprobs)
        return TokenRow(
            req.rid,
            req.attempt,
            a,
            ids[sent:].tobytes(),
            b"" if req.logprobs is None else pack_f32(req.logprobs[a:b]),
            req.top_logprobs[a:b],
            prompt_values,
            req.prompt_top if prompt_values else [],
            req.finish,
        )

    def _stream_from_now_on(self, req: Req) -> None:
        """Ids of a plain request need no further look here."""
        if req.status is Status.RUNNING and req.slot >= 0:
            table = self.state.need_pool().table
            table.streaming[req.slot] = table.plain[req.slot]

    def _set_sent(self, req: Req, n: int) -> None:
        if req.slot >= 0:
            self.state.need_pool().table.set_sent(req, n)
        else:
            req.sent_len = n


def new_rows(table: SlotTable) -> list[TokenRow]:
    """Ids that were not handed over yet of the slots that stream; they count as handed over."""
    rows = []
    for slot in compress(range(table.max_slots), table.streaming):
        begin, end, req = table.sent[slot], table.known[slot], table.reqs[slot]
        if begin < end and req is not None:
            table.sent[slot] = end
            rows.append(TokenRow(req.rid, req.attempt, begin - req.prompt_len, table.ids_up_to(slot, end, begin)))
    return rows
