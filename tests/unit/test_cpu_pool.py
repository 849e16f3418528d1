"""The KV pool's memory is made real ahead of use, and nothing that is written meanwhile is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_proc.kernels.cpu.packing import HUGE_PAGE
from worker_proc.kernels.cpu.pool import WAKE_BYTES, KvPool

PAGE_BYTES = 1 << 20


def is_real(pool: KvPool, offset: int) -> bool:
    """The system has memory behind this byte of the pool (bit 63 of its entry in the page map)."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek((pool.address + offset) // 4096 * 8)
        return bool(int.from_bytes(file.read(8), "little") >> 63)


def wait_until_real(pool: KvPool, num_bytes: int) -> None:
    """The thread is at least so far; it runs when nobody else wants a core."""
    deadline = time.monotonic() + 60
    while pool.real_bytes < num_bytes:
        assert time.monotonic() < deadline, f"{pool.real_bytes} of {num_bytes} bytes are real"
        time.sleep(0.001)


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = KvPool(256, PAGE_BYTES, ahead_bytes=WAKE_BYTES)
    yield made
    made.close()


def test_the_first_pages_are_real_before_they_are_used(pool: KvPool) -> None:
    wait_until_real(pool, WAKE_BYTES)
    assert pool.real_bytes == WAKE_BYTES
    assert all(is_real(pool, offset) for offset in range(0, WAKE_BYTES, HUGE_PAGE))
    assert not is_real(pool, WAKE_BYTES + HUGE_PAGE)


def test_it_stays_ahead_of_the_highest_page_in_use(pool: KvPool) -> None:
    pool.reach(100)
    goal = 101 * PAGE_BYTES // WAKE_BYTES * WAKE_BYTES + WAKE_BYTES
    wait_until_real(pool, goal)
    assert pool.real_bytes == goal
    pool.reach(3)  # pages once in use stay real
    assert pool.real_bytes == goal


def test_it_ends_with_the_pool(pool: KvPool) -> None:
    pool.reach(255)
    wait_until_real(pool, 256 * PAGE_BYTES)
    assert pool.real_bytes == 256 * PAGE_BYTES


def test_what_a_step_writes_meanwhile_is_kept(pool: KvPool) -> None:
    pages = pool.pages
    pool.reach(255)
    for page in range(256):
        pages[page] = page  # the thread writes to the same huge pages, ahead of this loop or behind it
    wait_until_real(pool, 256 * PAGE_BYTES)
    assert all(bool((pages[page] == page).all()) for page in range(256))


def test_closing_ends_the_thread_at_work_or_asleep() -> None:
    for wanted in (0, WAKE_BYTES):
        pool = KvPool(256, PAGE_BYTES, ahead_bytes=WAKE_BYTES)
        wait_until_real(pool, wanted)
        thread = pool._thread
        pool.close()
        pool.close()
        assert thread is not None and not thread.is_alive()


def test_a_small_pool_has_no_thread() -> None:
    pool = KvPool(4, HUGE_PAGE)
    assert pool._thread is None
    pool.pages[:] = 1
    pool.close()
