"""A process without memory ends and is replaced; it does not fail one request after the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import errors
from common.errors import raise_if_starved
from common.messages import Grammar, Rejected
from gateway.main import end_if_starved
from tests.unit.test_tokenizer_server import NUMBERS, Bench
from tests.unit.worker_fakes import FakeBackend, FakeRunner, FakeSession, begin, step
from tokenizer_proc.prepare import Preparer
from worker_proc.executor import StepExecutor
from worker_proc.sampling.cpu import CpuSampler

ROOT = Path(__file__).resolve().parents[2]
MORE_THAN_THERE_IS = 1 << 60


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be allocated any more."""
    monkeypatch.setattr(errors, "_SPARE_BYTES", MORE_THAN_THERE_IS)


def no_memory(*_: object) -> None:
    raise MemoryError


def test_a_request_that_asks_for_too_much_is_told_from_a_process_without_memory() -> None:
    raise_if_starved(ValueError("something else"))
    try:
        bytearray(MORE_THAN_THERE_IS)
    except MemoryError as error:
        raise_if_starved(error)
    program = (
        "import resource; from common.errors import raise_if_starved\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1, -1))\n"
        "try: bytearray(1 << 24)\n"
        "except MemoryError as error: raise_if_starved(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "MemoryError" in done.stderr


def test_tokenizer_refuses_the_request_that_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preparer, "prepare", no_memory)
    bench = Bench()
    bench.generate("huge")
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected) and reply.error.status == 500


@pytest.mark.usefixtures("starved")
@pytest.mark.parametrize("grammar", [None, NUMBERS])
def test_tokenizer_ends(monkeypatch: pytest.MonkeyPatch, grammar: Grammar | None) -> None:
    monkeypatch.setattr(Preparer, "prepare", no_memory)
    bench = Bench()
    with pytest.raises(MemoryError):
        bench.generate("any", grammar=grammar)
        bench.finish_jobs()  # with a grammar: beside the loop
    assert not bench.replies() and not bench.scheduler.sent


class Session(FakeSession):
    accept_token = no_memory  # type: ignore[assignment]


class Backend(FakeBackend):
    def compile(self, _: Grammar) -> FakeSession:
        return Session([{3, 4}, {5, 6}])


def run_a_constrained_step() -> list[str]:
    """What the rows that failed say."""
    executor = StepExecutor(FakeRunner(), CpuSampler(1), Backend())
    try:
        record = begin(0, [1, 2], [0], grammar=NUMBERS)
        return [failure.message for failure in executor.execute(step(1, [(0, 2, [])], begins=[record])).failures]
    finally:
        executor.close()


def test_worker_fails_the_row_that_is_too_much() -> None:
    assert run_a_constrained_step() == ["grammar: "]


@pytest.mark.usefixtures("starved")
def test_worker_ends() -> None:
    with pytest.raises(MemoryError):
        run_a_constrained_step()


def test_gateway_ends_when_a_callback_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def callback_fails(error: Exception) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(end_if_starved)

        def callback() -> None:
            raise error

        loop.call_soon(callback)
        await asyncio.sleep(0.01)

    asyncio.run(callback_fails(ValueError("harmless")))
    assert codes == []
    asyncio.run(callback_fails(MemoryError()))
    assert codes == [1]
