"""Steps of many rows: the array operations give what the loops give."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from common.messages import StepResult, pack_i32
from scheduler_proc import wide
from scheduler_proc.batch import decoding_rows
from scheduler_proc.commit import Commit, append_plain
from scheduler_proc.fakes import FakeReader
from scheduler_proc.output import new_rows
from scheduler_proc.request import Req
from scheduler_proc.slots import FEW, FLAGS, NUM_STOP_COLUMNS, NUMBERS, SlotTable
from scheduler_proc.state import InFlight
from tests.unit.sched_support import Rig, expected, request

NUM_SLOTS = 64
SEEDS = range(20)


def make_table(seed: int) -> tuple[SlotTable, np.random.Generator]:
    """Slots in any state: some free, some with pages, room for growth or stop ids of their own, some without."""
    rng = np.random.default_rng(seed)
    table = SlotTable(NUM_SLOTS, 100)
    for i in range(NUM_SLOTS):
        stop = rng.integers(1, 9, rng.integers(0, NUM_STOP_COLUMNS)).tolist()
        prompt = rng.integers(1, 9, rng.integers(1, 20)).tolist()
        req = Req(i, request(f"r{i}", prompt, int(rng.integers(1, 5)), stop_token_ids=tuple(stop)), 0.0)
        req.pages = list(range(rng.integers(1, 7)))
        table.take(req, 4)
        table.headroom[i] = rng.integers(0, 2) * 5
        table.computed[i] = rng.integers(0, len(prompt))
        table.sampling[i] = table.rows[i] = rng.integers(0, 3)
        for flags in (table.running, table.decoding, table.plain, table.streaming):
            flags[i] = int(rng.integers(0, 4) > 0)
        table.append(req, int(rng.integers(1, 9)))
        table.sent[i] = table.known[i] - rng.integers(0, 2 + seed % 2)
        if rng.integers(0, 5) == 0:
            table.give_back(req)
    return table, rng


def columns(table: SlotTable) -> dict[str, Any]:
    """Everything that a step may change."""
    ids = [table.ids_up_to(slot, table.known[slot]) for slot in range(NUM_SLOTS)]
    return {name: table.view(name).tolist() for name in (*NUMBERS, *FLAGS)} | {"ids": ids}


def rows_of(table: SlotTable, rng: np.random.Generator) -> array[int]:
    """Some slots that are taken, in any order."""
    taken = [req.slot for req in table.taken()]
    return array("i", rng.permutation(taken)[: rng.integers(1, len(taken))].tolist())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_rows_decode_and_want_pages(seed: int) -> None:
    (table, _), (other, _) = make_table(seed), make_table(seed)
    slots = table.decoding_slots()
    rows, wishing, needy = decoding_rows(table, slots)
    assert wide.decoding_rows(other, slots) == (rows, wishing, needy)
    assert rows and set(needy) <= set(wishing) <= set(rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_result_leaves_the_same_ids_and_counts(seed: int) -> None:
    (table, rng), (other, _) = make_table(seed), make_table(seed)
    slots = rows_of(table, rng)
    chunks = array("i", (rng.integers(0, 2, len(slots)) * 3).tolist())
    samples = rng.integers(0, 2, len(slots)).astype(np.uint8).tobytes()
    flight = InFlight(1, slots, chunks, samples, 0, 0, ())
    num_ids = rng.choice([0, 1, 1, 1, 1, 2, 3], len(slots))
    flags = (rng.integers(0, 6, len(slots)) == 0).astype(np.uint8).tobytes()
    ids = rng.integers(1, 9, num_ids.sum())
    result = StepResult(epoch=1, step=1, num_ids=pack_i32(num_ids), ids=pack_i32(ids), flags=flags)
    Commit._note_computed(table, flight, result.num_ids)
    wide.note_computed(other, flight, result.num_ids)
    assert columns(table) == columns(other)
    said = append_plain(table, slots, result)
    assert wide.append_plain(other, slots, result) == said
    assert columns(table) == columns(other)
    left = {row for row, _, _ in said[2]}
    assert all(plain or row in left for row, plain in enumerate(table.plain[slot] for slot in slots))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_ids_go_out_once(seed: int) -> None:
    (table, _), (other, _) = make_table(seed), make_table(seed)
    rows = new_rows(table)
    assert rows and wide.new_rows(other) == rows
    assert columns(table) == columns(other)
    assert new_rows(table) == wide.new_rows(other) == []


def test_a_wide_batch_generates_what_each_request_gives_alone() -> None:
    n = 2 * FEW
    rig = Rig(pages=8 * n, slots=n, max_running_requests=n, chunked_prefill_size=1 << 16)
    prompts = {f"r{i}": [1 + i % 7, 2 + i // 7, 3] for i in range(n)}
    lengths = {rid: 3 + i % 9 for i, rid in enumerate(prompts)}
    rig.step(*(request(rid, prompt, lengths[rid]) for rid, prompt in prompts.items()))
    assert len(rig.scheduler.state.need_pool().in_flight[-1].slots) == n
    rig.finish()
    assert isinstance(rig.reader, FakeReader)
    for rid, prompt in prompts.items():
        assert rig.ids(rid) == expected(prompt, lengths[rid])
    assert rig.scheduler.state.need_pool().table.sampling.count(0) == n
