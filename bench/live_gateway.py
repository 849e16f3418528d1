"""A gateway in a thread of this process, on a port the system chooses: for tests and benchmarks."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import uvloop

from common.channels import Channels
from common.config import ServerConfig
from common.process import ProcessContext
from gateway.main import Gateway
from gateway.server import listen

START_TIMEOUT_S = 10.0


class LiveGateway:
    """Serves until the block ends. ``config.http.port`` should be 0; ``url`` says where it listens."""

    def __init__(self, run_dir: Path, config: ServerConfig, index: int = 0) -> None:
        self.context = ProcessContext("gateway", index, 0, config, run_dir, Channels(run_dir))
        listener = listen(config.http)
        self.port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.gateway = Gateway(self.context)
        self.error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="gateway", daemon=True)

    def __enter__(self) -> LiveGateway:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the gateway did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        """As SIGTERM does: drain, then end."""
        self.context.stopping = True

    def join(self) -> None:
        """Wait for the end; raises what the gateway raised."""
        self._thread.join(START_TIMEOUT_S)
        if self.error is not None:
            raise self.error

    def _run(self, listener: object) -> None:
        async def serve() -> None:
            asyncio.get_running_loop().call_soon(self._started.set)
            await self.gateway.run(listener)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            self.error = error
        finally:
            self.context.channels.close()
