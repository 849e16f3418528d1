"""Start the server: ``python launch.py --model X`` (see ``--help``).

Reads flags, makes sure of the port and the model, makes the run directory, and hands over to the
supervisor, which starts and watches the processes.

Exit codes: 0 after SIGTERM or SIGINT, 1 when a process failed for good, 2 for a wrong flag, file
or model. The reason is on the last line.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from common import config as config_file
from common import flags
from common.config import HostsConfig, ServerConfig
from common.curve import engine_curve
from common.errors import ConfigError
from common.inboxes import remote_address, split_tcp
from common.process import EXIT_CONFIG, setup_logging
from launcher.children import Command, fleet_of, package_command
from launcher.ports import claim_port
from launcher.run_dir import RunDir
from launcher.signals import Signals
from launcher.supervisor import Supervisor
from worker_proc.prepare import resolve

ROOT = Path(__file__).resolve().parent

log = logging.getLogger("launch")


def prepare(config: ServerConfig) -> ServerConfig:
    """Port and model made sure of: the port is a number, ``model_dir`` a folder, the served name set.

    Raises ``ConfigError``.
    """
    port = claim_port(config.http.host, config.http.port)
    hosts = prepare_hosts(config)
    model = resolve.resolve(config.model)
    names = config.model.served_model_name or [model.name]
    replace = msgspec.structs.replace
    return replace(
        config,
        http=replace(config.http, port=port),
        hosts=hosts,
        model=replace(config.model, served_model_name=names, tokenizer=model.tokenizer),
        model_dir=str(model.folder),
    )


def prepare_hosts(config: ServerConfig) -> HostsConfig:
    """Keys and ports for gateways on other hosts made sure of; ``curve_keys`` absolute. Raises ``ConfigError``."""
    hosts = config.hosts
    if not hosts.engine_listen:
        return hosts
    try:
        host, first = split_tcp(hosts.engine_listen)
        ipaddress.ip_address(host)
        last = split_tcp(remote_address(hosts.engine_listen, f"tokenizer-{config.http.tokenizers - 1}"))[1]
    except ValueError as error:
        raise ConfigError(f"--engine-listen {hosts.engine_listen}: {error}; an example: tcp://0.0.0.0:31000") from None
    folder = Path(hosts.curve_keys).resolve()
    engine_curve(folder)
    for port in range(first, last + 1):
        if port == config.http.port:
            raise ConfigError(f"--engine-listen needs the ports {first} to {last}, and --port is one of them")
        claim_port(host, port)
    return msgspec.structs.replace(hosts, curve_keys=str(folder))


def serve(config: ServerConfig, began: float, command_for: Callable[[Path], Command]) -> int:
    """Run the fleet in a fresh run directory; returns the exit code."""
    run_dir, signals = RunDir(), Signals()
    try:
        path = run_dir.path / "config.json"
        path.touch(mode=0o600)  # API keys are in it
        path.write_bytes(config_file.save(config))
        fleet = fleet_of(config)
        supervisor = Supervisor(config, run_dir.path, fleet, command_for(run_dir.path), ROOT, began, signals)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup must keep its meaning
                signal.signal(number, supervisor.request_stop)
        return supervisor.run()
    finally:
        signals.close()
        run_dir.close()


def main(argv: list[str] | None = None, command_for: Callable[[Path], Command] = package_command) -> int:
    """The command ``launch.py``; returns the exit code. ``command_for``: run dir -> how a process is started."""
    began = time.monotonic()
    config = flags.parse(argv)
    setup_logging(config, "launch")
    try:
        return serve(prepare(config), began, command_for)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        log.error("interrupted before the start")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
