"""Gateways and workers that come and go; operations; what is told to whom."""

from __future__ import annotations

import msgspec

from common.messages import (
    Control,
    ControlReply,
    Fleet,
    GatewayLease,
    GatewayStuck,
    Reset,
    StepResult,
    TokenizerReady,
    WorkerControl,
    pack_i32,
)
from scheduler_proc.fakes import FakeWorker, WorkerCrash
from scheduler_proc.gateways import LEASE_S
from scheduler_proc.scheduler import IDLE_STATUS_S, STATUS_S
from tests.unit.sched_support import GATEWAY, PAGE, VOCAB, Rig, expected, request

P6 = [7, 8, 9, 10, 11, 12]


def control(action: str, **fields: object) -> Control:
    return Control(request_id="c", gateway=GATEWAY, action=action, **fields)  # type: ignore[arg-type]


def reply(rig: Rig) -> ControlReply:
    ((gateway, message),) = rig.out.replies
    assert gateway == GATEWAY
    return message


def replace_worker(rig: Rig, generation: int) -> None:
    """The worker died with what it was sent; its successor starts."""
    old = rig.worker
    rig.worker = FakeWorker(num_pages=old.num_pages, page_size=PAGE, context_len=512, vocab_size=VOCAB,
                            max_slots=old.max_slots, generation=generation, poison=old.poison)  # fmt: skip
    rig.orders.clear()
    rig.inbox.clear()
    rig.step(rig.worker.ready())


def run_with_crashes(rig: Rig) -> int:
    """Replace the worker whenever it dies; how often it did."""
    crashes = 0
    for _ in range(400):
        try:
            rig.work()
        except WorkerCrash:
            crashes += 1
            replace_worker(rig, crashes)
        rig.step()
        if rig.scheduler.idle and not rig.orders:
            return crashes
    raise AssertionError("it does not come to an end")


# --------------------------------------------------------------------------- gateways


def test_a_new_gateway_is_made_known_and_a_restart_of_others_repeats_it() -> None:
    rig = Rig()
    rig.step(rig.lease())
    assert [(a.gateway, a.address, a.gone) for a in rig.out.addresses] == [(GATEWAY, "ipc://gateway-0", False)]
    rig.step(rig.lease())
    assert rig.out.addresses == []
    rig.step(Fleet(generations={"detokenizer-0": 1}))
    assert len(rig.out.addresses) == 1
    rig.step(TokenizerReady(generation=1, context_len=1, vocab_size=1, has_chat_template=False))
    assert len(rig.out.addresses) == 1


def test_a_gateway_whose_lease_runs_out_has_its_requests_aborted() -> None:
    rig = Rig()
    rig.step(rig.lease(), rig.lease("gateway-1"), request("a", P6, 99), request("b", P6, 8, gateway="gateway-1"))
    for _ in range(int(LEASE_S) + 2):
        rig.step(rig.lease("gateway-1"), seconds=1.0)
        if rig.out.tokens is not None and rig.out.tokens.gone_gateways:
            break
    assert rig.reader.gone == [GATEWAY] and "a" not in rig.scheduler.state.reqs
    assert [(a.gateway, a.gone) for a in rig.out.addresses] == [(GATEWAY, True)]
    for _ in range(60):
        rig.turn()
    assert rig.ids("b") == expected(P6, 8)
    assert rig.scheduler.state.metrics.num_aborted == {"gateway_gone": 1}
    assert rig.free + rig.cached == 64


def test_a_pause_of_the_scheduler_itself_costs_no_gateway_its_lease() -> None:
    rig = Rig()
    rig.step(rig.lease(), request("a", P6, 99))
    rig.step(seconds=3600.0)
    assert rig.reader.gone == []


def test_a_closing_gateway_and_a_stuck_one_are_gone_at_once() -> None:
    rig = Rig()
    rig.step(rig.lease(), rig.lease("gateway-1"))
    rig.step(rig.lease(closing=True), GatewayStuck(gateway="gateway-1"))
    assert rig.reader.gone == [GATEWAY, "gateway-1"]


def test_a_gateway_that_was_only_slow_hears_of_the_end_of_its_requests() -> None:
    rig = Rig()
    rig.step(rig.lease(), request("a", P6, 99))
    rig.step(GatewayStuck(gateway=GATEWAY))
    rig.step(rig.lease())
    assert [(row.rid, row.attempt, row.finish.reason) for row in rig.refused] == [("a", 0, "abort")]


def test_a_gateway_that_was_replaced_is_gone_before_its_successor_says_a_word() -> None:
    rig = Rig()
    rig.step(rig.lease(), rig.lease("gateway-1"), rig.lease("far"), request("a", P6, 99))
    rig.turn()
    rig.step(Fleet(generations={"gateway-0": 1, "gateway-1": 0}))
    assert rig.reader.gone == [GATEWAY] and "a" not in rig.scheduler.state.reqs
    rig.step(rig.lease(generation=1), request("b", P6, 2))
    rig.step(Fleet(generations={"gateway-0": 1, "gateway-1": 0}))
    rig.finish()
    assert rig.reader.gone == [GATEWAY] and rig.ids("b") == expected(P6, 2)
    assert rig.free + rig.cached == 64


def test_the_successor_of_a_gateway_starts_with_nothing_of_its() -> None:
    rig = Rig()
    rig.step(rig.lease(), request("a", P6, 99))
    rig.step(rig.lease(generation=1), request("b", P6, 2))
    assert rig.reader.gone == [GATEWAY] and rig.out.wake_at == rig.now
    rig.step()
    rig.finish()
    assert rig.ids("b") == expected(P6, 2) and not rig.refused
    rig.step(rig.lease(generation=0))
    assert rig.scheduler.gateways.known[GATEWAY].generation == 1


# --------------------------------------------------------------------------- workers


def test_nothing_is_sent_before_the_worker_answered_the_reset() -> None:
    rig = Rig(start=False)
    rig.step(request("a", P6))
    (reset,) = rig.out.to_worker
    assert isinstance(reset, Reset)
    rig.step(rig.worker.ready())
    (again,) = rig.out.to_worker
    assert isinstance(again, Reset) and again.epoch > reset.epoch
    rig.step(rig.worker.ready(reset.epoch))
    assert not rig.scheduler.ready, "that was the answer to an older one"
    rig.step(rig.worker.ready(again.epoch))
    assert rig.scheduler.ready


def test_an_unanswered_reset_is_repeated() -> None:
    rig = Rig(start=False)
    rig.step()
    rig.step()
    assert rig.out.to_worker == []
    rig.step(seconds=6.0)
    assert len(rig.out.to_worker) == 1


def test_epochs_of_two_schedulers_never_meet() -> None:
    from scheduler_proc.scheduler import Scheduler

    rig = Rig()
    successor = Scheduler(rig.config, generation=1)
    (reset,) = successor.step([], 0.0).to_worker
    assert isinstance(reset, Reset) and reset.epoch > rig.scheduler.state.epoch + 1000


def test_rank_0_answers_for_all_ranks() -> None:
    import msgspec

    rig = Rig(start=False)
    config = msgspec.structs.replace(rig.config, worker=msgspec.structs.replace(rig.config.worker, tp_size=2))
    rig.scheduler = type(rig.scheduler)(config)
    rig.step()
    (reset,) = rig.out.to_worker
    assert isinstance(reset, Reset)
    rig.step(msgspec.structs.replace(rig.worker.ready(reset.epoch), num_pages=50))
    assert rig.scheduler.state.need_pool().allocator.num_pages == 50


def test_after_a_worker_restart_streams_go_on_where_they_were() -> None:
    rig = Rig()
    rig.step(request("a", P6, 20), request("b", P6[::-1], 20, logprobs=1))
    for _ in range(6):
        rig.turn()
    assert 0 < len(rig.ids("a")) < 20
    replace_worker(rig, 1)
    rig.finish()
    assert rig.ids("a") == expected(P6, 20) and rig.ids("b") == expected(P6[::-1], 20)
    assert len(rig.reader.streams["b"].logprobs) == 20
    assert rig.scheduler.state.suspects == {}


def test_results_of_another_epoch_are_dropped() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    rig.step(StepResult(epoch=12345, step=1, num_ids=pack_i32([1]), ids=pack_i32([1]), flags=b"\0"))
    rig.finish()
    assert rig.ids("a") == expected(P6, 8)


def test_the_fleets_word_about_a_new_worker_is_enough() -> None:
    rig = Rig()
    rig.step(request("a", P6))
    rig.step(Fleet(generations={"worker-0": 1}))
    assert not rig.scheduler.ready and isinstance(rig.out.to_worker[0], Reset)
    assert rig.out.status is not None and rig.out.status.generations["worker-0"] == 1
    assert not rig.out.status.ready


def test_a_request_that_kills_the_worker_is_found_and_fails_alone() -> None:
    rig = Rig()
    rig.worker.poison["bad"] = 9
    rig.step(*(request(name, [i + 1, *P6], 12) for i, name in enumerate(["a", "b", "bad", "c"])))
    assert run_with_crashes(rig) == 2
    assert rig.status("bad") == 500
    for i, name in enumerate(["a", "b", "bad", "c"]):
        if name != "bad":
            assert rig.ids(name) == expected([i + 1, *P6], 12)
    assert rig.scheduler.state.excused_crashes == 2
    assert rig.scheduler.state.suspects == {}
    assert rig.scheduler.state.metrics.num_failed == {"worker_crash": 1}
    assert rig.scheduler.state.metrics.num_aborted == {}


def test_two_that_kill_the_worker_are_both_found() -> None:
    rig = Rig()
    rig.worker.poison |= {"bad": 9, "worse": 8}
    rig.step(*(request(name, [i + 1, *P6], 12) for i, name in enumerate(["bad", "a", "worse"])))
    assert run_with_crashes(rig) == 3
    assert rig.status("bad") == rig.status("worse") == 500
    assert rig.ids("a") == expected([2, *P6], 12)
    assert rig.scheduler.state.excused_crashes == 3


def test_a_worker_that_died_of_something_else_convicts_nobody() -> None:
    rig = Rig()
    rig.step(request("a", P6, 12), request("b", P6[::-1], 12))
    rig.turn()
    replace_worker(rig, 1)
    rig.finish()
    rig.step(request("c", P6, 12))
    rig.turn()
    replace_worker(rig, 2)
    rig.finish()
    assert [rig.reason(name) for name in "abc"] == ["length"] * 3
    assert rig.scheduler.state.excused_crashes == 0


def test_suspects_run_alone_and_others_wait_for_the_verdict() -> None:
    rig = Rig()
    rig.step(request("a", P6, 30), request("b", P6[::-1], 30))
    for _ in range(4):
        rig.turn()
    replace_worker(rig, 1)
    rig.step(request("new", [9] * 5, 4))
    alone = []
    while rig.scheduler.state.suspects:
        for batch in rig.turn():
            alone.append(len(batch.slots) // 4)
    assert set(alone[:-2]) == {1} and len(alone) >= 4
    rig.finish()
    assert rig.ids("a") == expected(P6, 30) and rig.ids("new") == expected([9] * 5, 4)


# --------------------------------------------------------------------------- operations


def test_abort_one_and_abort_all() -> None:
    rig = Rig(max_running_requests=1)
    rig.step(request("a", P6), request("b", P6), request("c", P6))
    rig.step(control("abort", rid="b"))
    assert reply(rig).status == 200 and rig.reason("b") == "abort"
    rig.step(control("abort", rid="b"))
    assert reply(rig).status == 404
    rig.step(control("abort_all"))
    assert reply(rig).body == {"aborted": 2}
    rig.finish()
    assert rig.reason("a") == rig.reason("c") == "abort"


def test_info_and_what_gateways_elsewhere_are_told_hold_no_keys() -> None:
    rig = Rig()
    http = msgspec.structs.replace(rig.config.http, api_key=["secret-1"], admin_api_key=["secret-2"])
    rig.scheduler.state.config = msgspec.structs.replace(rig.config, http=http)
    rig.step(control("info"))
    info = reply(rig).body
    assert info["max_total_tokens"] == 256 and info["worker"]["model_path"] == "fake"
    rig.step(control("config"))
    shared = reply(rig).body
    assert shared["has_keys"] and shared["has_admin_keys"]
    for body in (info, shared):
        assert b"secret" not in msgspec.json.encode(body)


def test_the_profiler_is_the_workers_and_its_answer_is_passed_on() -> None:
    rig = Rig()
    rig.step(control("start_profile", directory="d"))
    (order,) = rig.out.to_worker
    assert isinstance(order, WorkerControl) and order.directory == "d"
    rig.turn()
    assert reply(rig).status == 200
    rig.orders.clear()
    rig.step(control("stop_profile"))
    rig.orders.clear()
    rig.step(seconds=31.0)
    assert reply(rig).status == 503


def test_drain_is_announced() -> None:
    rig = Rig()
    rig.step(control("drain"))
    assert reply(rig).status == 200
    assert rig.out.status is not None and rig.out.status.draining


def test_status_counts_and_uses_sglangs_names() -> None:
    rig = Rig()
    rig.step(request("a", P6), seconds=1.0)
    status = rig.out.status
    assert status is not None and status.ready and status.num_running == 1
    assert (status.max_total_tokens, status.context_len, status.vocab_size) == (256, 512, VOCAB)
    rig.finish()
    rig.step(request("b", P6), seconds=1.0)
    rig.finish()
    rig.step(seconds=1.0)
    assert rig.out.status is not None
    metrics = rig.out.status.metrics
    assert metrics["prompt_tokens_total"] == 12 and metrics["cached_tokens_total"] == 4
    assert metrics["generation_tokens_total"] == 16 and metrics["num_requests_total"] == 2
    assert abs(metrics["cache_hit_rate"] - 4 / 12) < 1e-9
    assert metrics["num_running_reqs"] == metrics["num_queue_reqs"] == metrics["token_usage"] == 0
    assert metrics["num_finished_requests_total_length"] == 2
    for row in rig.out.status.histograms.values():
        assert row[1] == sum(row[2:])


def test_status_comes_seldom_while_idle_and_at_once_when_work_ends_or_a_gateway_comes() -> None:
    rig = Rig()
    rig.step(seconds=IDLE_STATUS_S)
    assert rig.out.status is not None
    rig.step(seconds=IDLE_STATUS_S - 0.1)
    assert rig.out.status is None and abs(rig.out.wake_at - rig.now - 0.1) < 1e-6
    rig.step(rig.lease("gateway-0"))
    assert rig.out.status is not None
    rig.step(request("a", P6, 40))
    assert rig.out.status is None and rig.out.wake_at <= rig.now + STATUS_S
    rig.step(seconds=STATUS_S)
    assert rig.out.status is not None and rig.out.status.num_running == 1
    told = []
    while not told or told[-1].num_running:
        assert rig.now < 200
        rig.turn()
        told += [rig.out.status] if rig.out.status is not None else []
    assert rig.scheduler.idle
    assert told[-1].metrics["num_finished_requests_total_length"] == 1, "what has ended is told at once"
    rig.step(seconds=STATUS_S)
    assert rig.out.status is None


def test_lease_type_is_what_gateways_send() -> None:
    assert isinstance(Rig().lease(), GatewayLease)


def test_health_checks_run_and_are_counted_nowhere() -> None:
    rig = Rig()
    before = rig.scheduler.state.metrics.counters()
    rig.turn(request("health-1", [1, 2, 3, 4], max_tokens=3))
    rig.finish()
    assert rig.ids("health-1") == expected([1, 2, 3, 4], 3)
    after = rig.scheduler.state.metrics.counters()
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"num_steps_total", "num_prefill_tokens_total"}, "the steps did run"
    rig.scheduler.check_invariants()
