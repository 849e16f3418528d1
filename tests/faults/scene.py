"""One cell: bring requests into their phases, let the fault happen, and see how they end."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.cells import DECODING, MAX_DRAFTS, PREFILL_CHUNK, Cell, body_of, num_slots
from tests.faults.faults import Fault
from tests.faults.streams import Reply, Stream, connect, server_info
from tests.integration.server import Server, eventually

MAX_RUNNING = 8
BEGUN_EVENTS = 3
SETTLE_S = 60.0
NUM_TRIES = 5
SERVER_ARGS = [
    "--device", "cpu", "--cpu-threads", "1", "--dtype", "auto", "--max-total-tokens", "65536", "--gateways", "2",
    "--max-running-requests", str(MAX_RUNNING), "--chunked-prefill-size", str(PREFILL_CHUNK),
    "--hang-timeout-s", "3", "--max-restarts", "100", "--drain-seconds", "120",
    "--speculative-num-draft-tokens", str(MAX_DRAFTS),
]  # fmt: skip
"""A pool in which nobody is preempted, and restarts without end: it is we who kill."""
DOOMED, OTHER = "gateway-0", "gateway-1"


class Scene:
    """The requests of one cell on one server. ``play`` runs it; then ``pauses`` has what was measured."""

    def __init__(self, server: Server, cell: Cell, expected: dict[str, Reply], salt: str) -> None:
        """``expected``: phase -> what an undisturbed run gave. ``salt`` is used for no other cell."""
        self._server = server
        self._cell = cell
        self._expected = expected
        self._salt = salt
        self._tried = 0
        self._streams: list[tuple[str, Stream]] = []
        """(phase, stream) whose ends are compared."""
        self._doomed: list[Stream] = []
        """Of the gateway that dies."""
        self.pauses: dict[str, float] = {}
        """Phase -> seconds of the longest silence after the fault; for a gateway that of the other's streams."""

    def play(self, fault: Fault) -> None:
        """Raises AssertionError unless every stream ends as if nothing had happened, and the engine is whole after."""
        for number in range(NUM_TRIES):
            self._tried = number  # what a try computed would help the next through the prefix cache
            self._bring_into_phase()
            began = time.monotonic()
            if self._in_phase():
                break
            self._let_end()
        else:
            raise AssertionError(f"the requests were not in their phases in {NUM_TRIES} tries: the server is too fast")
        fault.strike()
        for phase, stream in self._streams:
            stream.join()
            assert stream.over_at > began, f"{phase}: its stream was over before the fault"
            got, wanted = stream.reply(), self._expected[phase]
            assert got == wanted, f"{phase} of {stream.gateway}: {difference(got, wanted)}"
            self._note_pause(phase, stream.pause_s(began))
        for stream in self._doomed:
            stream.join()
        fault.recover()

    def _note_pause(self, phase: str, pause_s: float) -> None:
        phases = self._cell.phases if self._cell.role == "gateway" else (phase,)
        for name in phases:
            self.pauses[name] = max(pause_s, self.pauses.get(name, 0.0))

    # ------------------------------------------------------------------ before the fault

    def _bring_into_phase(self) -> None:
        """Decoding ones first, then fillers for the slots that are left, then the long prompt, then who waits."""
        self._streams, self._doomed = [], []
        phases = self._cell.phases
        first = [self._open(phase) for phase in DECODING if phase in phases]
        room = MAX_RUNNING - sum(num_slots(phase) for phase in phases)
        wanted = room if "waiting" in phases else min(room, 2)
        first += [self._fill(("greedy", "sampled")[number % 2]) for number in range(wanted)]
        eventually(lambda: all(s.num_events >= BEGUN_EVENTS or s.over_at for s in first), SETTLE_S, "decoding")
        if "prefill" in phases:
            long = self._open("prefill")
            eventually(lambda: bool(long.status or long.over_at), SETTLE_S, "the long prompt is accepted")
        if "waiting" in phases:
            watch = connect(self._server.url)
            self._open("waiting")
            eventually(lambda: self._waits(watch), SETTLE_S, "it waits")
            watch.close()

    def _open(self, phase: str) -> Stream:
        """A request of the cell's. Where a gateway dies they are its own, and others are compared."""
        if self._cell.role == "gateway":
            stream = Stream(self._server.url, DOOMED, body_of(phase, f"{self._salt}-{self._tried}"))
            self._doomed.append(stream)
        else:
            gateway = (DOOMED, OTHER)[len(self._streams) % 2]
            stream = Stream(self._server.url, gateway, body_of(phase, f"{self._salt}-{self._tried}"))
            self._streams.append((phase, stream))
        stream.start()
        return stream

    def _fill(self, phase: str) -> Stream:
        gateway = OTHER if self._cell.role == "gateway" else (DOOMED, OTHER)[len(self._streams) % 2]
        stream = Stream(self._server.url, gateway, body_of(phase, f"{self._salt}-{self._tried}"))
        self._streams.append((phase, stream))
        stream.start()
        return stream

    def _waits(self, watch: Any) -> bool:
        mine = self._of("waiting")
        # A gateway that has just been started again has not heard of the scheduler yet, and says nothing of it.
        metrics = server_info(watch)["scheduler"].get("metrics", {})
        return metrics.get("num_queue_reqs", 0) >= 1 or bool(mine.status or mine.over_at)

    def _of(self, phase: str) -> Stream:
        """The cell's own stream of a phase."""
        if self._cell.role != "gateway":
            return next(stream for name, stream in self._streams if name == phase)
        order = [name for name in (*DECODING, "prefill", "waiting") if name in self._cell.phases]
        return self._doomed[order.index(phase)]

    def _in_phase(self) -> bool:
        """Whether every request is where its phase says, now."""
        streams = [stream for _, stream in self._streams] + self._doomed
        phases = self._cell.phases
        if any(stream.over_at for stream in streams):
            return False
        if "waiting" in phases and self._of("waiting").status:
            return False
        return "prefill" not in phases or self._of("prefill").num_events == 0

    def _let_end(self) -> None:
        for stream in [stream for _, stream in self._streams] + self._doomed:
            stream.join()


def difference(got: Reply, wanted: Reply) -> str:
    """Where two replies part, in a line."""
    for index in wanted.texts.keys() | got.texts.keys():
        ours, theirs = got.texts.get(index, ""), wanted.texts.get(index, "")
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            at = min(len(ours), len(theirs)) if at is None else at
            place = f"{ours[at : at + 30]!r} instead of {theirs[at : at + 30]!r}"
            return f"choice {index} differs from character {at} of {len(theirs)} on: {place}"
    return f"{got.finish_reasons}, {got.usage} instead of {wanted.finish_reasons}, {wanted.usage}"


def undisturbed(server: Server) -> dict[str, Reply]:
    """Phase -> what its request gives when nothing happens, each run alone."""
    found = {}
    for phase in (*DECODING, "prefill", "waiting"):
        stream = Stream(server.url, OTHER, body_of(phase, "undisturbed"))
        stream.start()
        stream.join()
        found[phase] = stream.reply()
    return found
