"""Start the fleet, watch it, replace what dies or hangs, and end it without leaving anything behind.

One thread, one loop: collect the dead, read heartbeats, judge, start what is due, tell the
scheduler the generations. While all serve it sleeps until a signal or a death, and reads its mail now and
then. The state of the whole is one of starting, serving, draining, stopping.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

from common.channels import Channels
from common.config import ServerConfig
from common.messages import Fleet, Heartbeat
from common.notify import Notifier
from common.process import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, HEARTBEAT_S, reason_file
from launcher import screen
from launcher.children import STOP_ORDER, Child, Command, Spec, child_environment, explain_exit
from launcher.health import why_hung
from launcher.signals import Signals

log = logging.getLogger(__name__)

TURN_S = 0.05
CALM_TURN_S = HEARTBEAT_S
"""While all serve: heartbeats lie that long before they are read."""
SLEPT_S = 2.0
"""A turn that took longer than this did not run: the machine or the supervisor was stopped."""
FLEET_EVERY_S = 0.5
CALM_FLEET_EVERY_S = 2.0
STACK_DUMP_S = 0.5
"""From asking a hung process for its stacks to killing it."""
STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL, drain not counted."""
NUM_OPEN = "num_open"
"""Key of the scheduler's ``Heartbeat.info``: requests without an ending, whichever host their gateway is on."""
FORGIVEN = "worker_crashes_forgiven"
"""Key of the scheduler's ``Heartbeat.info``: worker crashes it has laid to one request's charge."""


class Supervisor:
    """Runs the fleet until a signal or a failure ends it. ``run`` returns the exit code."""

    def __init__(
        self,
        config: ServerConfig,
        run_dir: Path,
        fleet: list[Spec],
        command: Command,
        root: Path,
        began: float,
        signals: Signals,
    ) -> None:
        """``root``: folder of our packages. ``began``: time.monotonic() at which the user started us."""
        self._config = config
        self._run_dir = run_dir
        self._command = command
        self._env = child_environment(root)
        self._began = began
        self._children = [Child(spec, config.runtime.max_restarts) for spec in fleet]
        self._channels = Channels(run_dir)
        self._inbox = self._channels.receiver("supervisor")
        self._to_scheduler = self._channels.sender("scheduler")
        self._notifier = Notifier()
        self._signals = signals
        self._last_turn = time.monotonic()
        self._last_fleet = 0.0
        self._was_ready = False
        self._draining = False
        self._num_stop_signals = 0
        self._forgiven = 0
        self._failure: tuple[int, str] | None = None

    def request_stop(self, number: int, _frame: object = None) -> None:
        """Signal handler: the first asks for a drain, the second for an end at once."""
        self._num_stop_signals += 1

    def run(self) -> int:
        """Serve; returns when every child is gone. The last line logged says why it ended if it failed."""
        try:
            while not self._num_stop_signals and self._failure is None:
                self._turn()
                self._announce_ready()
            if self._was_ready and self._failure is None:
                self._drain()
            self._stop_all()
        except BaseException:
            for child in self._children:
                child.kill_group()
            raise
        finally:
            self._channels.close()
        if self._failure is not None:
            code, reason = self._failure
            log.error("%s", reason)
            return code
        log.info("stopped")
        return EXIT_OK

    # ------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        now = self._wake()
        self._read_heartbeats(now)
        self._collect_dead(now)
        self._judge(now)
        self._start_due(now)
        self._tell_fleet(now)
        self._notifier.ping()

    def _wake(self) -> float:
        if self._is_calm(time.monotonic()):
            self._signals.wait(min(CALM_TURN_S, self._notifier.ping_every_s))
        else:
            self._inbox.wait(TURN_S)
        now = time.monotonic()
        slept = now - self._last_turn
        self._last_turn = now
        if slept > SLEPT_S:
            for child in self._children:
                child.excuse(slept)
        return now

    def _is_calm(self, now: float) -> bool:
        """All serve and were heard of: the next thing to do is in a while, or a signal tells of it."""
        return not self._draining and all(
            child.ready and child.kill_at is None and not child.is_late(now) for child in self._children
        )

    def _read_heartbeats(self, now: float) -> None:
        by_name = {child.name: child for child in self._children}
        beats: list[Heartbeat] = self._inbox.receive()
        for beat in beats:
            child = by_name.get(f"{beat.role}-{beat.index}")
            if child is None:
                continue
            child.on_beat(beat, now)
            if beat.role == "scheduler" and beat.generation == child.generation:
                self._forgive(int(beat.info.get(FORGIVEN, 0)))

    def _forgive(self, total: int) -> None:
        for _ in range(total - self._forgiven):
            for child in self._children:
                if child.spec.role == "worker":
                    child.history.forgive()
        self._forgiven = total

    def _collect_dead(self, now: float) -> None:
        for child in self._children:
            was_ready = child.ready
            code = child.collect()
            if code is not None:
                self._on_death(child, code, was_ready, now)

    def _on_death(self, child: Child, code: int, was_ready: bool, now: float) -> None:
        how = explain_exit(code)
        if self._draining and child.spec.role == "gateway":
            return  # it has finished its streams, as it was asked to
        if code == EXIT_CONFIG:
            self._fail(EXIT_CONFIG, f"{child.name}: {self._reason(child, 'refused its configuration')}")
            return
        self._fell_ranks_with(child)
        delay = child.history.died(now, was_ready=was_ready)
        if delay is None:
            times = child.history.num_recent
            self._fail(
                EXIT_FAILED,
                f"{child.name} ended {times} times in a row or within a minute, last with {how}; "
                f"--max-restarts {self._config.runtime.max_restarts} is passed. Its own messages are above",
            )
            return
        log.warning("%s ended (%s); starting it again %s", child.name, how, f"in {delay:g} s" if delay else "now")
        child.start_at = now + delay

    def _fell_ranks_with(self, dead: Child) -> None:
        """The ranks of a tensor-parallel worker live and die together: a group cannot be joined again.

        A group's ranks find each other by its generation, so one that was not even started yet keeps up.
        """
        if dead.spec.role != "worker" or dead.felled:
            return
        for child in self._children:
            if child.spec.role == "worker" and child is not dead:
                if child.running:
                    child.felled = True
                    child.kill_group()
                else:
                    child.generation = dead.generation

    def _reason(self, child: Child, default: str) -> str:
        try:
            return reason_file(self._run_dir, child.name).read_text(encoding="utf-8").strip() or default
        except OSError:
            return default

    def _judge(self, now: float) -> None:
        runtime = self._config.runtime
        for child in self._children:
            if child.kill_at is not None:
                if now >= child.kill_at:
                    child.kill_group()
                continue
            others_ready = child.spec.role == "worker" or all(c.ready for c in self._children if c is not child)
            reason = why_hung(
                child,
                now,
                start_timeout_s=runtime.start_timeout_s,
                hang_timeout_s=runtime.hang_timeout_s,
                others_ready=others_ready,
            )
            if not reason:
                continue
            if not self._was_ready:
                self._fail(EXIT_FAILED, f"{child.name}: {reason}{': ' if child.detail else ''}{child.detail}")
            log.error("%s is hung: %s; its stacks follow, then it is killed", child.name, reason)
            child.send_signal(signal.SIGUSR1)
            child.kill_at = now + STACK_DUMP_S

    def _start_due(self, now: float) -> None:
        for child in self._children:
            due = child.start_at is not None and now >= child.start_at
            if not due or child.running or self._failure is not None:
                continue
            try:
                child.start(self._command, self._env, now)
            except OSError as error:
                self._fail(EXIT_FAILED, f"{child.name} cannot be started: {error}")
                return
            self._last_fleet = 0.0
            log.info("%s started, pid %d, generation %d", child.name, child.pid, child.generation)

    def _tell_fleet(self, now: float) -> None:
        if now - self._last_fleet < (CALM_FLEET_EVERY_S if self._is_calm(now) else FLEET_EVERY_S):
            return
        generations = {child.name: child.generation for child in self._children}
        num_bad = self._channels.num_bad + sum(c.num_bad_frames for c in self._children if c.spec.role != "gateway")
        message = Fleet(generations=generations, draining=self._draining, num_bad_frames=num_bad)
        if self._to_scheduler.send(message):
            self._last_fleet = now

    def _announce_ready(self) -> None:
        if self._was_ready or not all(child.ready for child in self._children):
            return
        self._was_ready = True
        took = time.monotonic() - self._began
        for line in screen.startup_table(self._config, self._children):
            log.info("%s", line)
        url = screen.base_url(self._config)
        print(f"\nReady on {url} after {took:.1f} s. Try:\n\n  {screen.curl_line(self._config)}\n", flush=True)
        self._notifier.ready(f"serving {self._config.model.served_model_name[0]} on {url}")

    # ------------------------------------------------------------------ the end

    def _fail(self, code: int, reason: str) -> None:
        if self._failure is None:
            self._failure = (code, reason)

    def _drain(self) -> None:
        """Stop accepting and let what runs finish, at most ``--drain-seconds``; a second signal cuts it short."""
        seconds = self._config.runtime.drain_seconds
        log.info("stopping: no new requests; what runs has %g s to finish", seconds)
        self._notifier.stopping(f"draining, at most {seconds:g} s")
        self._draining = True
        self._last_fleet = 0.0
        self._tell_fleet(time.monotonic())
        gateways = [child for child in self._children if child.spec.role == "gateway"]
        for child in gateways:
            child.send_signal(signal.SIGTERM)
            child.start_at = None
        deadline = time.monotonic() + seconds
        while self._still_serving(gateways) and self._num_stop_signals < 2 and self._failure is None:
            if time.monotonic() >= deadline:
                log.warning("the drain time is over; ending what still runs")
                return
            self._turn()

    def _still_serving(self, gateways: list[Child]) -> bool:
        """A gateway has not finished, or the scheduler has requests: gateways on other hosts are not ours to watch."""
        if any(child.running for child in gateways):
            return True
        scheduler = next((child for child in self._children if child.spec.role == "scheduler"), None)
        return scheduler is not None and scheduler.running and int(scheduler.info.get(NUM_OPEN, 0)) > 0

    def _stop_all(self) -> None:
        """SIGTERM in the order of the data's way, then SIGKILL whoever is left after the grace time.

        Who is still loading has nothing to lose and may not look at signals: it is killed at once.
        """
        self._draining = True
        for role in STOP_ORDER:
            for child in self._children:
                if child.spec.role == role and child.ready:
                    child.send_signal(signal.SIGTERM)
                elif child.spec.role == role:
                    child.kill_group()
        deadline = time.monotonic() + STOP_GRACE_S
        while late := [child for child in self._children if child.running]:
            if time.monotonic() >= deadline:
                deadline = float("inf")
                for child in late:
                    log.warning("%s did not end within %g s; killing it", child.name, STOP_GRACE_S)
                    child.kill_group()
            self._inbox.wait(TURN_S)
            self._inbox.receive()
            self._notifier.ping()
            for child in self._children:
                code = child.collect()
                if code is not None:
                    log.debug("%s ended (%s)", child.name, explain_exit(code))
