"""The worker's loop: take a message, do it, answer; sleep in poll when there is none.

Where the executor runs ahead, a step is launched before the one under way is finished, so the device has its next
forward pass before Python has looked at the ids of the last. A drawing that needs these ids is launched right after.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from common.channels import Receiver, Sender
from common.errors import RequestError
from common.messages import ForwardBatch, Message, Reset, WorkerControl, WorkerControlReply, WorkerReady, unpack_i32
from common.process import HEARTBEAT_S, ProcessContext
from common.trace import WorkerStep
from worker_proc.executor import StepExecutor
from worker_proc.launched import LaunchedStep
from worker_proc.profiling import Profiler

log = logging.getLogger(__name__)
_LOOK_S = 0.001
"""How often a step under way on a device is looked after while no message comes."""


@dataclass
class Pulse:
    """What the heartbeat thread reads; written by the loop."""

    ready: bool = False
    progress: int = 0
    busy_since: float = 0.0
    detail: str = "starting"
    info: dict[str, Any] | None = None


class HeartbeatThread:
    """Sends heartbeats while the main thread is inside a long step (or loads weights).

    It owns the supervisor channel alone: ZeroMQ sockets are not shared between threads. A step that
    hangs shows as a ``busy_since`` that gets old while ``progress`` stands still.
    """

    def __init__(self, context: ProcessContext, pulse: Pulse) -> None:
        self._context, self._pulse = context, pulse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin beating."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; before the channels are closed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            p = self._pulse
            self._context.beat(
                ready=p.ready, progress=p.progress, busy_since=p.busy_since, detail=p.detail, info=p.info
            )
            self._stop.wait(self._context.beat_in_s if p.ready else HEARTBEAT_S / 2)  # being ready is told soon


class WorkerLoop:
    """Receives steps and controls in order, answers each.

    ``ready`` is the ``WorkerReady`` to announce (epoch 0); every ``Reset`` is answered with its own epoch.
    """

    def __init__(
        self,
        context: ProcessContext,
        executor: StepExecutor,
        inbox: Receiver[Any],
        outbox: Sender,
        ready: WorkerReady,
        pulse: Pulse,
    ) -> None:
        self._context, self._executor = context, executor
        self._inbox, self._outbox, self._ready, self._pulse = inbox, outbox, ready, pulse
        self._todo: deque[Message] = deque()
        self._under_way: LaunchedStep | None = None
        """Launched and not finished; only where the executor runs ahead."""
        self._epoch = 0
        self._profiler = Profiler()
        self._idle_from = time.perf_counter()

    def run(self) -> None:
        """Until the process is asked to stop."""
        self._send(self._ready)
        while not self._context.stopping:
            self._todo.extend(self._inbox.receive())
            if self._todo:
                self._handle(self._todo.popleft())
            elif self._under_way is None:
                self._inbox.wait(HEARTBEAT_S)
            elif self._under_way.ready:
                self._finish_under_way()
            else:
                self._inbox.wait(_LOOK_S)  # a message that comes now may be the step that follows
        self._profiler.abandon()

    def _handle(self, message: Message) -> None:
        if isinstance(message, ForwardBatch):
            self._step(message)
            return
        self._finish_under_way()
        if isinstance(message, Reset):
            self._executor.reset()
            self._epoch = message.epoch
            self._send(msgspec.structs.replace(self._ready, epoch=message.epoch))
        elif isinstance(message, WorkerControl):
            self._send(self._control(message))

    def _step(self, batch: ForwardBatch) -> None:
        if batch.epoch != self._epoch:
            log.debug("dropped step %d of epoch %d; this is epoch %d", batch.step, batch.epoch, self._epoch)
            return
        before, idle_s = self._under_way, 0.0
        if before is None:
            self._pulse.busy_since = time.time()
            idle_s = time.perf_counter() - self._idle_from
        with self._profiler.step(batch.step):
            step = self._executor.launch(batch, idle_s, before)
            if not self._executor.runs_ahead:
                self._finish(step)
                return
        self._finish_under_way(after=step)
        if not step.is_drawn:
            with self._profiler.step(batch.step):
                self._executor.draw(step)
        self._under_way = step
        self._pulse.busy_since = time.time()

    def _finish_under_way(self, after: LaunchedStep | None = None) -> None:
        step, self._under_way = self._under_way, None
        if step is not None:
            self._finish(step, after)

    def _finish(self, step: LaunchedStep, after: LaunchedStep | None = None) -> None:
        batch, result = step.batch, self._executor.finish(step, after)
        self._send(result)
        if self._context.trace is not None:
            prefill = int(unpack_i32(batch.num_tokens).sum())
            rows = len(batch.slots) // 4
            self._context.trace.write(WorkerStep(batch.epoch, batch.step, result.started, time.time(), rows, prefill))
        self._pulse.progress += 1
        self._pulse.busy_since = 0.0
        self._idle_from = time.perf_counter()

    def _control(self, control: WorkerControl) -> WorkerControlReply:
        try:
            if control.action == "start_profile":
                words = self._profiler.start(control.directory)
            else:
                words = self._profiler.stop()
        except RequestError as error:
            return WorkerControlReply(
                request_id=control.request_id, ok=False, message=str(error), status=error.info.status
            )
        except (OSError, RuntimeError) as error:
            return WorkerControlReply(request_id=control.request_id, ok=False, message=str(error))
        return WorkerControlReply(request_id=control.request_id, ok=True, message=words)

    def _send(self, message: Message) -> None:
        """Answers are never dropped: the scheduler has at most two steps in flight, so this hardly ever waits."""
        while not self._outbox.send(message) and not self._context.stopping:
            time.sleep(0.001)
