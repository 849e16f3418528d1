"""The worker's comings and goings: epochs, resets, and requests suspected of killing it."""

from __future__ import annotations

from common.messages import Reset, ToWorker, WorkerReady
from scheduler_proc.ingest import Ingest
from scheduler_proc.life import Life
from scheduler_proc.request import Req
from scheduler_proc.state import Pool, State

RESET_REPEAT_S = 5.0


class Workers:
    """Holds the handshake: the worker answers the current Reset, then there is a pool.

    With ``--tp-size`` this is its rank 0, which speaks for all: see ``worker_proc/parallel``.

    Epochs of different scheduler processes never meet: the generation is their upper part.
    """

    def __init__(self, state: State, life: Life, ingest: Ingest) -> None:
        self.state = state
        self.life = life
        self.ingest = ingest
        self.next_reset = 0.0
        if state.epoch == 0:
            state.epoch = (state.generation << 20) + 1

    def ready(self, message: WorkerReady) -> None:
        """A worker says that it can run steps."""
        state = self.state
        if message.epoch == state.epoch:
            if state.pool is not None:
                return  # a repeated Reset was answered twice
            self._start(message)
        elif message.epoch == 0:
            self.lost(f"worker-{message.rank} has started (generation {message.generation})")

    def _start(self, ready: WorkerReady) -> None:
        state = self.state
        state.worker_generation = ready.generation
        state.pool = Pool(ready, state.config)
        pages = f"{ready.num_pages} pages of {ready.page_size} tokens"
        state.log.append(("info", f"worker ready: {pages}, {state.pool.max_tokens} in all"))
        self.ingest.waiting_misfits()

    def lost(self, why: str) -> None:
        """Whatever the worker held is gone. Everyone waits again; the next Reset names a new epoch."""
        state = self.state
        if state.pool is not None:
            self._suspect(state.pool)
            num = state.pool.table.num_taken
            state.log.append(("warning", f"{why}: {num} requests that ran wait again"))
            self.life.requeue_all()
        state.epoch += 1
        self.next_reset = 0.0

    def resets(self, now: float) -> list[ToWorker]:
        """The Reset, while it is not answered, every ``RESET_REPEAT_S``."""
        if self.state.pool is not None or now < self.next_reset:
            return []
        self.next_reset = now + RESET_REPEAT_S
        return [Reset(epoch=self.state.epoch, scheduler_generation=self.state.generation)]

    def _suspect(self, pool: Pool) -> None:
        """Remember whose rows were in flight; a suspect that crashed the worker alone is convicted."""
        state, table = self.state, pool.table
        in_flight: dict[str, Req] = {}
        for flight in pool.in_flight:
            for slot in flight.slots:
                req = table.reqs[slot]
                if req is not None:
                    in_flight[req.rid] = req
        if not in_flight:
            return
        state.unexplained_crashes = state.unexplained_crashes + 1 if state.suspects else 1
        for req in in_flight.values():
            req.crashes += 1
        culprit = next(iter(in_flight.values())) if len(in_flight) == 1 else None
        if culprit is not None and culprit.finish is None and culprit.rid in state.suspects and culprit.crashes > 1:
            state.excused_crashes += state.unexplained_crashes
            state.unexplained_crashes = 0
            words = "the model worker ended abnormally twice while it ran this request, the second time with it alone"
            state.log.append(("error", f"{culprit.rid}: {words}; its crashes do not count as restarts"))
            self.life.fail(culprit, 500, words, code="worker_crash")
            return
        for req in in_flight.values():
            if req.finish is None:
                position = req.scheduled_len
                if table.decoding[req.slot] or table.sampling[req.slot]:
                    position = table.known[req.slot] - 1 + table.sampling[req.slot]
                state.suspects[req.rid] = max(position, state.suspects.get(req.rid, 0))
