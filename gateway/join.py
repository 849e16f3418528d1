"""A gateway on another host than its engine: ``python -m gateway --engine tcp://HOST:PORT --curve-keys DIR``.

It does what a local one does. Instead of the run directory's sockets it uses the engine's tcp channels, instead of
config.json it asks the scheduler for the configuration, and its lease names an address on this host at which the
engine answers. So it may join and leave at any time; killed, its lease runs out, and its requests are aborted as a
local gateway's are. It outlives the engine: requests go on when the engine is back within ``GIVE_UP_S``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import setproctitle
import uvloop

from common import flags
from common.channels import Channels, Receiver
from common.config import HttpConfig, RuntimeConfig, Section, ServerConfig, flag
from common.curve import Curve, gateway_curve, key_in_hex
from common.errors import ConfigError, RequestError
from common.inboxes import join_tcp, remote_address, split_tcp
from common.messages import Control, ControlReply, ErrorInfo, GatewayLease
from common.notify import Notifier
from common.process import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ProcessContext, open_trace, setup_logging
from gateway.main import Gateway
from gateway.server import listen

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
GIVE_UP_S = 60.0
"""Open requests fail when the engine has not been heard of for this long."""


class JoinConfig(Section, frozen=True, kw_only=True):
    """Engine"""

    engine: Annotated[str, flag("tcp://HOST:PORT of the engine, its --engine-listen")] = ""
    curve_keys: Annotated[str, flag("folder that --make-curve-keys made for this gateway")] = ""
    inbox: Annotated[
        str, flag("tcp://ADDRESS:PORT where the engine reaches this gateway; empty: as seen from the engine, any port")
    ] = ""
    advertise: Annotated[
        str, flag("tcp://ADDRESS:PORT that leads to the inbox, where it differs (containers, NAT)")
    ] = ""


class JoinCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Run a gateway that joins the engine of another host. The model and its settings are the engine's."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"gateways", "tokenizers", "hang_timeout_s", "max_restarts"})

    join: JoinConfig = JoinConfig()
    http: HttpConfig = HttpConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def __post_init__(self) -> None:
        if not self.join.engine or not self.join.curve_keys:
            raise ConfigError("--engine and --curve-keys are needed: which engine to join, and with which keys")
        for option, address in (("--engine", self.join.engine), ("--inbox", self.join.inbox),
                                ("--advertise", self.join.advertise)):  # fmt: skip
            try:
                if address:
                    split_tcp(address)
            except ValueError as error:
                raise ConfigError(f"{option}: {error}") from None
        if any(not key for key in (*self.http.api_key, *self.http.admin_api_key)):
            raise ConfigError("--api-key, --admin-api-key: a key is empty; leave the flag out to serve without keys")


class JoinedChannels(Channels):
    """The engine's channels as seen from another host, and this gateway's inbox."""

    def __init__(self, join: JoinConfig, name: str, curve: Curve, engine_key: bytes) -> None:
        super().__init__(Path(name), lambda: curve)
        self._engine = join.engine
        self._engine_key = key_in_hex(engine_key)
        bind = join.inbox or f"tcp://{_own_host(join.engine)}:0"
        self.inbox: Receiver[Any] = super().receiver(name, bind)
        host, port = split_tcp(join.advertise or self.inbox.address)
        self.inbox.address = join_tcp(_number_of(host), port, key_in_hex(curve.public))

    def address_of(self, inbox: str) -> str:
        """``scheduler`` and ``tokenizer-<i>`` of the engine."""
        return f"{remote_address(self._engine, inbox)}#{self._engine_key}"

    def receiver(
        self, inbox: str, address: str | None = None, accepts: Callable[[Any], bool] | None = None
    ) -> Receiver[Any]:
        """This gateway's one inbox, open since the beginning."""
        return self.inbox


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 after SIGTERM, 1 when the engine went or never came, 2 for wrong flags."""
    command = flags.parse_as(JoinCommand, argv, "python -m gateway")
    name = f"gateway-{secrets.token_hex(3)}@{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())[:40]}"
    own = ServerConfig(http=command.http, runtime=command.runtime)
    setup_logging(own, name)
    setproctitle.setproctitle(f"quintet {name}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        curve, engine_key = gateway_curve(Path(command.join.curve_keys))
        channels = JoinedChannels(command.join, name, curve, engine_key)
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return EXIT_CONFIG
    context = ProcessContext("gateway", 0, 0, own, Path(name), channels, label=name, notifier=Notifier())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, context.request_stop)
    try:
        return _serve(context, channels, command)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    finally:
        # Also when the engine's configuration does not suit us; said twice, it changes nothing.
        farewell = GatewayLease(gateway=name, address=channels.inbox.address, generation=0, closing=True)
        channels.sender("scheduler").send(farewell)
        if context.trace is not None:
            context.trace.close()
        channels.close()


def _serve(context: ProcessContext, channels: JoinedChannels, command: JoinCommand) -> int:
    listener = listen(command.http)
    shared = ask(context, channels, command)
    if shared is None:
        return EXIT_OK if context.stopping else EXIT_FAILED
    context.config = configured(shared, command)
    context.trace = open_trace(context)
    gateway = Gateway(context)
    gc.collect()
    gc.freeze()
    log.info("joined the engine at %s; serving on %s:%d", command.join.engine, command.http.host, command.http.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return EXIT_OK if runner.run(_run(gateway, context, listener, shared)) else EXIT_FAILED


def ask(context: ProcessContext, channels: JoinedChannels, command: JoinCommand) -> dict[str, Any] | None:
    """The engine's configuration; None when it does not answer in time, or when asked to stop."""
    scheduler = channels.sender("scheduler")
    inbox, engine = channels.inbox, command.join.engine
    request_id = secrets.token_hex(8)
    deadline = time.monotonic() + command.runtime.start_timeout_s
    next_log = time.monotonic() + 3 * ASK_EVERY_S
    try:
        while not context.stopping:
            scheduler.send(GatewayLease(gateway=context.name, address=inbox.address, generation=0))
            scheduler.send(Control(request_id=request_id, gateway=context.name, action="config"))
            until = time.monotonic() + ASK_EVERY_S
            while time.monotonic() < until and not context.stopping:
                context.beat(ready=False, progress=0, detail=f"waits for the engine at {engine}")
                inbox.wait(0.1)
                for message in inbox.receive():
                    if isinstance(message, ControlReply) and message.request_id == request_id:
                        return message.body
            if time.monotonic() > deadline:
                log.error("the engine at %s did not answer within %g s (--start-timeout-s). Does it run with this "
                          "--engine-listen, does it know our key %s, and can it reach %s?",
                          engine, command.runtime.start_timeout_s, *_place_and_key(inbox.address))  # fmt: skip
                return None
            if time.monotonic() > next_log:
                next_log += 10.0
                log.info("waiting for the engine at %s", engine)
        return None
    finally:
        scheduler.close()


def configured(shared: dict[str, Any], command: JoinCommand) -> ServerConfig:
    """The engine's configuration with our own HTTP and runtime settings.

    Raises ``ConfigError`` when it cannot be read, and when clients would need a key there and none here.
    """
    try:
        config = msgspec.convert(shared.get("config"), ServerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the engine's configuration is not understood ({error}): is it the same version?") from None
    for kind, own in (("has_keys", command.http.api_key), ("has_admin_keys", command.http.admin_api_key)):
        if shared.get(kind) and not own:
            option = "--api-key" if kind == "has_keys" else "--admin-api-key"
            raise ConfigError(f"the engine's own gateways ask for a key: give this one {option} too")
    http = msgspec.structs.replace(command.http, tokenizers=config.http.tokenizers)
    return msgspec.structs.replace(config, http=http, runtime=command.runtime)


async def _run(gateway: Gateway, context: ProcessContext, listener: socket.socket, shared: dict[str, Any]) -> bool:
    """Serve until asked to stop (True) or until the engine is another one (False)."""
    watching = asyncio.ensure_future(_watch_engine(gateway, context, shared))
    await gateway.run(listener)
    if watching.done():
        return watching.result()
    watching.cancel()
    return True


async def _watch_engine(gateway: Gateway, context: ProcessContext, shared: dict[str, Any]) -> bool:
    """Returns, with the gateway told to stop, when the engine was started again with other settings."""
    engine = gateway.engine
    known_run = ""
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        status = engine.fleet.status
        silent_s = time.monotonic() - engine.fleet.heard
        if status is not None and engine.exchanges and silent_s > GIVE_UP_S:
            words = f"the engine has not been heard of for {GIVE_UP_S:g} s"
            engine.fail_all(ErrorInfo(status=503, message=words, code="engine_silent", retry_after_s=5))
        if status is None or status.run == known_run:
            continue
        try:
            now = (await engine.questions.control("config", wait_s=5.0)).body
        except RequestError:
            continue  # it does not answer yet
        if now != shared:
            log.error("the engine was started again with other settings; this gateway ends, to be started again")
            engine.fail_all(ErrorInfo(status=503, message="the engine was replaced", code="engine_replaced"))
            context.request_stop()
            return False
        known_run = status.run


def _own_host(engine: str) -> str:
    """This host's address on the way to the engine. Raises ``ConfigError`` when the name is not known."""
    host, port = split_tcp(engine)
    family, kind, _, _, address = _look_up(host, port)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent: the kernel only chooses the way
        return f"[{probe.getsockname()[0]}]" if family == socket.AF_INET6 else str(probe.getsockname()[0])


def _number_of(host: str) -> str:
    return str(_look_up(host, 1)[4][0])


def _look_up(host: str, port: int) -> tuple[Any, ...]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host!r}: {error.strerror}") from None


def _place_and_key(address: str) -> tuple[str, str]:
    place, _, key = address.partition("#")
    return key[:8] + "...", place
