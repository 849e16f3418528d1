"""The order in which waiting requests are considered."""

from __future__ import annotations

import pytest

from common.messages import pack_i32
from scheduler_proc.pages import PageAllocator
from scheduler_proc.policy import LPM_QUEUE_LIMIT, make_policy
from scheduler_proc.queue import WaitingQueue
from scheduler_proc.radix import RadixTree
from scheduler_proc.request import Req
from tests.unit.sched_support import Rig, expected, request, rows


def queue_of(*reqs: Req) -> WaitingQueue:
    queue = WaitingQueue()
    for req in reversed(reqs):
        queue.add(req)
    return queue


def tree_with(*prefixes: list[int]) -> RadixTree:
    tree = RadixTree(PageAllocator(64), page_size=2)
    for prefix in prefixes:
        pages = tree.allocator.alloc(len(prefix) // 2)
        assert pages is not None
        tree.insert("", pack_i32(prefix), pages)
    return tree


def order(name: str, queue: WaitingQueue, tree: RadixTree, now: float) -> list[str]:
    return [req.rid for req in make_policy(name).order(queue, tree, now)]


@pytest.mark.parametrize(
    ("name", "names"),
    [("fcfs", ["a", "b", "c"]), ("lpm", ["b", "c", "a"]), ("priority", ["c", "a", "b"])],
)
def test_order(name: str, names: list[str]) -> None:
    queue = queue_of(
        Req(0, request("a", [9, 9, 9, 9, 9]), 0.0),
        Req(1, request("b", [1, 1, 2, 2, 3, 3, 4]), 0.0),
        Req(2, request("c", [1, 1, 2, 2, 9, 9, 4], priority=1), 0.0),
    )
    assert order(name, queue, tree_with([1, 1, 2, 2, 3, 3]), 1.0) == names


@pytest.mark.parametrize(
    ("name", "names"),
    [("fcfs", ["late", "later", "a", "b"]), ("lpm", ["late", "later", "b", "a"]),
     ("priority", ["b", "late", "later", "a"])],
)  # fmt: skip
def test_who_has_output_goes_before_who_never_ran_but_not_before_a_higher_priority(name: str, names: list[str]) -> None:
    reqs = (
        Req(0, request("a", [9, 9, 9, 9, 9]), 0.0),
        Req(1, request("b", [1, 1, 2, 2, 3], priority=1), 0.0),
        Req(2, request("late", [9, 9, 9], output_ids=pack_i32([4])), 0.0),
        Req(3, request("later", [1, 1, 2, 2, 9], output_ids=pack_i32([4, 5])), 0.0),
    )
    queue = queue_of(*reqs)
    assert queue.has_resumed and not queue_of(*reqs[:2]).has_resumed
    tree = tree_with([1, 1, 2, 2])
    assert order(name, queue, tree, 1.0) == names
    assert order(name, queue, tree, 4.9) == names, "an order, not a matter of how long they waited"
    for req in (reqs[2], reqs[0]):
        queue.remove(req)
    assert [req.rid for req in queue] == ["later", "b"]


def test_lpm_serves_who_waited_long_first() -> None:
    queue = queue_of(Req(0, request("old", [9] * 5), 0.0), Req(1, request("hit", [1, 1, 2]), 9.0))
    assert order("lpm", queue, tree_with([1, 1]), 4.9) == ["hit", "old"]
    assert order("lpm", queue, tree_with([1, 1]), 9.5) == ["old", "hit"]


def test_lpm_with_a_long_queue_is_fcfs() -> None:
    reqs = [Req(i, request(f"r{i}", [9] * 5 if i else [8] * 5), 0.0) for i in range(LPM_QUEUE_LIMIT + 1)]
    assert order("lpm", queue_of(*reqs), tree_with([9, 9]), 0.0)[0] == "r0"
    assert order("lpm", queue_of(*reqs[1:]), tree_with([9, 9]), 0.0)[0] == "r1"


def test_priority_grows_with_waiting() -> None:
    queue = queue_of(Req(0, request("low", [1]), 0.0), Req(1, request("high", [1], priority=3), 14.0))
    assert order("priority", queue, tree_with(), 14.0) == ["high", "low"]
    assert order("priority", queue, tree_with(), 15.0) == ["low", "high"]


def test_the_queue_may_shrink_while_it_is_read() -> None:
    reqs = [Req(i, request(f"r{i}", [1]), 0.0) for i in range(4)]
    queue = queue_of(*reqs)
    seen = []
    for req in queue.lazily():
        seen.append(req.rid)
        if req.seq != 1:
            queue.remove(req)
    assert seen == ["r0", "r1", "r2", "r3"] and [req.rid for req in queue] == ["r1"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_stream_that_outlived_the_scheduler_does_not_wait_for_a_long_prompt_that_came_first(policy: str) -> None:
    rig = Rig(pages=128, schedule_policy=policy, chunked_prefill_size=16)
    long, prompt = [3] * 200, [7] * 21
    outputs = expected(prompt, 40)
    rig.step(request("long", long, max_tokens=3))  # of a gateway that was quicker to submit it again
    rig.turn()
    assert rig.scheduler.state.metrics.num_prefill_tokens_total >= 16
    again = request("again", prompt, 40, attempt=1, output_ids=pack_i32(outputs[:20]))
    chunks = [rows(batch) for batch in rig.turn(again)]
    for _ in range(6):
        chunks += [rows(batch) for batch in rig.turn()]
    slots = {rid: rig.scheduler.state.reqs[rid].slot for rid in ("long", "again")}
    spent = [(slot, chunk) for batch in chunks for slot, chunk, _ in batch if chunk]
    mine = [place for place, (slot, _) in enumerate(spent) if slot == slots["again"]]
    assert sum(spent[place][1] for place in mine) == 41 and mine == list(range(mine[0], mine[0] + 3))
    assert len(rig.ids("again")) > 20, "it goes on while the long prompt is computed"
    assert rig.scheduler.state.reqs["long"].scheduled_len < 200
    rig.finish()
    assert rig.ids("again") == outputs[: len(rig.ids("again"))] and len(rig.ids("again")) == 40
    assert rig.ids("long") == expected(long, 3)


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_nobody_starves_under_a_stream_of_favoured_requests(policy: str) -> None:
    rig = Rig(schedule_policy=policy, max_running_requests=1)
    hot = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rig.step(request("hot", hot, max_tokens=1))
    rig.finish()
    rig.step(request("hot-0", hot, max_tokens=4, priority=2), request("cold", [50] * 9, max_tokens=4))
    for i in range(1, 2000):
        rig.turn()
        if i % 4 == 0:
            rig.step(request(f"hot-{i}", hot, max_tokens=4, priority=2))
        if rig.reader.streams.get("cold") and rig.reason("cold"):
            break
    assert rig.ids("cold") == expected([50] * 9, 4)
    assert rig.scheduler.state.queue, "the others had not run out"


def test_fcfs_lets_nobody_overtake_a_request_that_does_not_fit_yet() -> None:
    rig = Rig(pages=16, schedule_conservativeness=1e-6)
    rig.step(request("a", [1] * 20, max_tokens=20))
    rig.step(request("large", [2] * 50, max_tokens=2), request("small", [3] * 4, max_tokens=2))
    begun = []
    for _ in range(60):
        for batch in rig.turn():
            begun += [begin.rid for begin in batch.begins]
    assert begun == ["large", "small"]
