"""Splitting over ranks: the arithmetic, the plans, the checkpoint's tensors, what rank 0 tells the others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist
from transformers.core_model_loading import WeightConverter as Convert

from common.channels import Channels
from common.config import ServerConfig
from common.errors import ConfigError, InvariantError
from common.messages import RankStep
from common.process import ProcessContext
from worker_proc.loading import choose_device
from worker_proc.loop import Pulse
from worker_proc.parallel.follower import FollowerLoop, unpack_step
from worker_proc.parallel.group import Membership, RankGroup
from worker_proc.parallel.leader import LeadingRunner
from worker_proc.parallel.plan import make_plan
from worker_proc.parallel.shares import Cut, balanced, head_share
from worker_proc.parallel.weights import PartOfTensor, cut_before
from worker_proc.runner import PackedBatch


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_balanced_spans_join_and_differ_by_a_unit_at_most(size: int, num_ranks: int) -> None:
    spans = [balanced(size, num_ranks, rank) for rank in range(num_ranks)]
    assert spans[0][0] == 0 and spans[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    sizes = [stop - start for start, stop in spans]
    differences = {size - min(sizes) for size in sizes}
    assert len(differences) <= 2 and max(differences) in (0, 1, 2, 4, 8, 16, 32, 64)


def test_spans_are_as_aligned_as_the_size_allows() -> None:
    assert [balanced(14336, 3, rank) for rank in range(3)] == [(0, 4736), (4736, 9536), (9536, 14336)]
    assert [balanced(100, 2, rank) for rank in range(2)] == [(0, 48), (48, 100)]
    assert [balanced(64, 4, rank) for rank in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [balanced(257, 2, rank) for rank in range(2)] == [(0, 128), (128, 257)]


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_heads_are_all_served_each_with_its_kv_head(num_kv_heads: int, groups: int, num_ranks: int) -> None:
    num_heads = num_kv_heads * groups
    try:
        shares = [head_share(num_heads, num_kv_heads, num_ranks, rank) for rank in range(num_ranks)]
    except ConfigError:
        assert num_ranks > num_kv_heads, "as many ranks as KV heads always works"
        assert num_ranks % num_kv_heads or num_ranks > num_heads
        return
    assert [head for share in shares for head in range(*share.heads)] == list(range(num_heads))
    for share in shares:
        assert share.num_heads % share.num_kv_heads == 0
        local_groups = share.num_heads // share.num_kv_heads
        for local in range(share.num_heads):
            assert (share.heads[0] + local) // groups == share.kv_heads[0] + local // local_groups


def test_heads_that_cannot_be_split_are_refused_with_the_sizes_that_can() -> None:
    with pytest.raises(ConfigError, match=r"--tp-size 3: 8 query heads and 2 KV heads .* a multiple of 2 up to 8"):
        head_share(8, 2, 3, 0)


# --------------------------------------------------------------------------- plans


SMALL: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 97, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3,
}  # fmt: skip


def outline(config: Any) -> Any:
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


def test_uneven_sizes_are_split_unevenly_and_whole_heads_stay_together() -> None:
    plans = [make_plan(outline(hf.LlamaConfig(**SMALL)), 2, rank) for rank in range(2)]
    layer = "model.layers.1."
    for name, size, first in (
        ("lm_head.weight", 257, 128),
        ("model.embed_tokens.weight", 257, 128),
        (layer + "self_attn.k_proj.weight", 24, 8),
        (layer + "self_attn.q_proj.weight", 48, 16),
        (layer + "mlp.up_proj.weight", 97, 48),
    ):
        assert plans[0].cuts[name] == Cut(-2, size, ((0, first),))
        assert plans[1].cuts[name] == Cut(-2, size, ((first, size),))
    assert plans[1].cuts[layer + "self_attn.o_proj.weight"] == Cut(-1, 48, ((16, 48),))
    assert plans[1].cuts[layer + "mlp.down_proj.weight"] == Cut(-1, 97, ((48, 97),))
    assert [plan.heads[layer + "self_attn"].num_kv_heads for plan in plans] == [1, 2]


def test_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    config = hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 1})
    keys = [make_plan(outline(config), 3, rank).cuts["model.layers.0.self_attn.k_proj.weight"] for rank in range(3)]
    assert keys == [Cut(-2, 8, ((0, 8),))] * 3


def test_experts_that_lie_packed_are_cut_in_both_halves() -> None:
    plan = make_plan(outline(hf.MixtralConfig(**SMALL, num_local_experts=4)), 2, 1)
    assert plan.cuts["model.layers.0.mlp.experts.gate_up_proj"] == Cut(-2, 194, ((48, 97), (97 + 48, 194)))
    assert plan.cuts["model.layers.0.mlp.experts.down_proj"] == Cut(-1, 97, ((48, 97),))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (hf.GPT2Config(n_embd=48, n_layer=1, n_head=4), "no plan to split GPT2LMHeadModel"),
        (hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4), "GptOssForCausalLM splits .*% of its weights"),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words + ".*use --tp-size 1"):
        make_plan(outline(config), 2, 0)


def test_more_ranks_than_values_are_refused() -> None:
    config = hf.LlamaConfig(**{**SMALL, "intermediate_size": 3, "num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(ConfigError, match=r"--tp-size 4: .*mlp.gate_proj.weight .* of 3, fewer than ranks"):
        make_plan(outline(config), 4, 0)


# --------------------------------------------------------------------------- weights


class Recorded:
    """A safetensors slice that notes what is read of it."""

    def __init__(self, source: Any) -> None:
        self.source, self.num_read = source, 0

    def get_shape(self) -> list[int]:
        shape: list[int] = self.source.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.source[index]
        self.num_read += found.numel()
        return found


@pytest.mark.parametrize(
    ("shape", "cut", "want"),
    [
        ((6, 4), Cut(-2, 6, ((2, 5),)), lambda t: t[2:5]),
        ((6, 4), Cut(-1, 4, ((1, 3),)), lambda t: t[:, 1:3]),
        ((6,), Cut(-1, 6, ((1, 3),)), lambda t: t[1:3]),
        ((3, 6, 4), Cut(-2, 6, ((1, 2), (4, 5))), lambda t: torch.cat([t[:, 1:2], t[:, 4:5]], 1)),
        ((3, 4), None, lambda t: t),
    ],
)
def test_only_the_ranks_part_of_a_tensor_is_read(tmp_path: Path, shape: Any, cut: Cut | None, want: Any) -> None:
    from safetensors import safe_open

    whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        source = Recorded(file.get_slice("w"))
        part = PartOfTensor(source, cut)
        assert source.num_read == 0
        got = part[...]
    assert torch.equal(got, want(whole))
    assert part.get_shape() == list(got.shape)
    assert source.num_read == got.numel()


def test_checkpoint_tensors_that_are_joined_are_cut_one_by_one() -> None:
    packed = Cut(-2, 194, ((48, 97), (145, 194)))
    stacked = Convert(["w1", "w3"], "gate_up", [MergeModulelist(dim=0), Concatenate(dim=1)])
    assert cut_before(stacked, packed, "gate_up") == Cut(-2, 97, ((48, 97),))
    assert cut_before(Convert("gate_up", "gate_up", [MergeModulelist(dim=0)]), packed, "gate_up") == packed
    with pytest.raises(ConfigError, match="gate is made from checkpoint tensors by Chunk, which cannot be split"):
        cut_before(Convert("both", ["gate", "up"], [Chunk(dim=0)]), packed, "gate")
    with pytest.raises(ConfigError, match="joins 3 checkpoint tensors, split as 2"):
        cut_before(Convert(["q", "k", "v"], "qkv", [Concatenate(dim=0)]), packed, "qkv")


# --------------------------------------------------------------------------- devices


def test_each_rank_has_its_own_gpu_and_nccl_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.update(current=device))
    monkeypatch.setattr(torch.distributed, "FileStore", lambda *where: where)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **how: started.update(how, of=backend))
    member = Membership(1, 2, 5, tmp_path, 30.0)
    device = choose_device("auto", member)
    RankGroup(member, device)
    assert device == started["device_id"] == started["current"] == torch.device("cuda", 1)
    assert (started["of"], started["rank"], started["world_size"]) == ("nccl", 1, 2)
    assert started["store"] == (str(tmp_path / "ranks-5"), 2), "each start of the group meets at a place of its own"
    RankGroup(member, torch.device("cpu"))
    assert (started["of"], started["device_id"]) == ("gloo", None)
    with pytest.raises(ConfigError, match="--tp-size 3: torch sees 2 CUDA devices, and each rank needs its own"):
        choose_device("auto", Membership(0, 3, 0, tmp_path, 30.0))


# --------------------------------------------------------------------------- rank 0 and the others


class SumRunner:
    """A runner whose logits are what it was given; keeps what it was asked."""

    name, batch_invariant, page_size, vocab_size, dtype, tile_tokens = "sum", False, 4, 8, "float32", 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def kv_bytes_per_page(self) -> int:
        return 1

    def weight_bytes(self) -> int:
        return 1

    def allocate(self, num_pages: int) -> None:
        self.calls.append(("allocate", num_pages))

    def forward(self, batch: PackedBatch) -> Any:
        self.calls.append(("forward", [getattr(batch, name).tolist() for name in batch.__slots__]))
        return np.zeros((batch.logit_rows.size, 8), np.float32)

    def copy_pages(self, src: Any, dst: Any) -> None:
        self.calls.append(("copy", [src.tolist(), dst.tolist()]))

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    one = Channels(tmp_path)
    yield one
    one.close()


def follower(channels: Channels, runner: SumRunner, generation: int = 3) -> FollowerLoop:
    context = ProcessContext("worker", 1, generation, ServerConfig(), channels.run_dir, channels)
    return FollowerLoop(context, runner, channels.receiver("rank-1"), Pulse())


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def test_a_follower_does_what_rank_0_does_and_ends_with_it(channels: Channels) -> None:
    first, other = SumRunner(), SumRunner()
    loop = follower(channels, other)
    leader = LeadingRunner(first, [channels.sender("rank-1")], 3, lambda: False)
    batch = PackedBatch(i32(5, 6, 7), i32(0, 1, 4), i32(0, 2, 3), i32(2, 5), i32(1, 0, 2, 3).reshape(2, 2), i32(1, 2))
    assert leader.forward(batch).shape == (2, 8)
    leader.copy_pages(i32(1, 2), i32(3, 4))
    leader.forward(batch)
    leader.close()
    loop.run()
    assert other.calls == first.calls[:-1]
    assert [name for name, _ in first.calls] == ["forward", "copy", "forward", "close"]


def test_a_follower_takes_nothing_from_an_earlier_group_and_nothing_out_of_order(channels: Channels) -> None:
    runner = SumRunner()
    loop, sender = follower(channels, runner), channels.sender("rank-1")
    for step in (
        RankStep(generation=2, number=1, copies=b"\1\0\0\0\2\0\0\0"),
        RankStep(generation=3, number=1, copies=b"\3\0\0\0\4\0\0\0"),
        RankStep(generation=3, number=3, copies=b"\3\0\0\0\4\0\0\0"),
    ):
        assert sender.send(step)
    with pytest.raises(InvariantError, match="step 3 of rank 0 came where 2 was due"):
        loop.run()
    assert runner.calls == [("copy", [[3], [4]])]


def test_a_batch_without_wanted_logits_arrives_whole() -> None:
    step = RankStep(generation=0, number=1, ids=b"\1\0\0\0", context_lens=b"\1\0\0\0", page_table=b"\7\0\0\0")
    batch = unpack_step(step)
    assert batch.logit_rows.tolist() == [] and batch.page_table.tolist() == [[7]]
