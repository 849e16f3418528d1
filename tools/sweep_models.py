"""Try a tiny random model of every causal language model in transformers on the worker's generic path.

    python -m tools.sweep_models [--only llama,gpt2] [--write docs/models.md]

Each architecture runs in a process of its own (some take long, or need packages that are not there):
a shrunken config, random weights, the worker's own refusals, probe and start-up check. The table
says *supported* when the logits over pages equal transformers' own, else why not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 96, "ffn_dim": 96,
    "n_inner": 96, "ffn_hidden_size": 96, "n_layer": 3, "num_layers": 3, "num_hidden_layers": 3, "n_layers": 3,
    "decoder_layers": 3, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "n_positions": 256,
    "n_ctx": 256, "max_seq_len": 256, "head_dim": 16, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 12,
    "attention_chunk_size": 12, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "vocab_size_per_layer_input": 211, "hidden_size_per_layer_input": 16, "word_embed_proj_dim": 64,
    "embedding_size": 64, "attention_window": 12,
}  # fmt: skip
"""Fields of configs that make a model tiny, whatever the architecture calls them."""


DERIVED = frozenset(
    {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size"}
)
"""Set even where the default is None: some architectures cannot work them out."""
AS_RELEASED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
}
"""Where a default config lacks the layers that every released model has."""


def shrink(config: Any) -> None:
    """Set what a config has of :data:`SMALL`, and cut per-layer lists to three layers, in place."""
    names = getattr(config, "attribute_map", {})
    for name, value in SMALL.items():
        if names.get(name) in SMALL:
            continue
        try:
            current = getattr(config, name, ...)
            if current is not ... and not isinstance(current, list) and (current is not None or name in DERIVED):
                setattr(config, name, value)
        except Exception:  # kept per layer: transformers then raises errors of its own
            continue
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention: as many key as query heads
        config.num_key_value_heads = SMALL["num_attention_heads"]
    for name, value in list(vars(config).items()):
        if name.endswith("layer_types") and isinstance(value, list) and len(value) > 3:
            kinds = list(dict.fromkeys(value))[:3]
            setattr(config, name, [*kinds, *[kinds[0]] * (3 - len(kinds))])
    for name in ("num_kv_shared_layers", "num_nextn_predict_layers", "mtp_num_layers"):
        if getattr(config, name, 0):
            setattr(config, name, 0)


def try_model(model_type: str) -> tuple[str, str, str]:
    """(class name, ``supported`` | ``refused`` | ``not tried``, details) of one architecture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from common.errors import ConfigError
    from worker_proc.attention.backend import TorchBackend, decode_gather
    from worker_proc.generic.refusals import check_supported
    from worker_proc.generic.runner import GenericRunner
    from worker_proc.generic.selfcheck import NUM_CHECK_PAGES, compare, reference_logits

    torch.manual_seed(0)
    name = model_type
    try:
        config = AutoConfig.for_model(model_type)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        name = model_class.__name__
        for field, value in AS_RELEASED.get(model_type, {}).items():
            setattr(config, field, value)
        check_supported(model_class, config.get_text_config(), 0)
        shrink(config.get_text_config())
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if sum(p.numel() for p in model.parameters()) > 300e6:
            return name, "not tried", "its config could not be made small"
        reference = reference_logits(model)
    except ConfigError as error:
        return name, "refused", _reason(error)
    except Exception as error:
        return name, "not tried", f"transformers cannot run a shrunken config: {_reason(error)}"
    try:
        plain = TorchBackend(16, torch.device("cpu"), decode_gather)
        runner = GenericRunner(model, page_size=16, attention=plain)
        runner.allocate(NUM_CHECK_PAGES)
        result = compare(runner, reference, model.get_input_embeddings().num_embeddings)
    except ConfigError as error:
        return name, "refused", _reason(error)
    except Exception as error:
        return name, "refused", f"fails on packed tokens: {_reason(error)}"
    if not result.ok:
        return name, "refused", f"the start-up check finds other logits (relative error {result.error:.2g})"
    kinds = sorted({_kind(spec) for spec in runner.specs})
    return name, "supported", ", ".join(kinds)


def _kind(spec: Any) -> str:
    if spec.window:
        return "sliding window"
    return "chunked attention" if spec.chunk else "full attention"


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()).removesuffix(" docs/models.md lists what is.")
    if " is not supported: " in words:
        words = words.split(" is not supported: ", 1)[1]
    return (words or type(error).__name__)[:160].rstrip(".")


def run_one(model_type: str, timeout_s: float) -> dict[str, str]:
    """One architecture in a forked process: the imports are paid once, and a crash or a hang stays its own."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(model_type, sending), daemon=True)
    child.start()
    sending.close()
    row = {"type": model_type, "name": model_type, "status": "not tried"}
    try:
        if not receiving.poll(timeout_s):
            return row | {"why": f"took longer than {timeout_s:.0f} s"}
        name, status, why = receiving.recv()
        return row | {"name": name, "status": status, "why": why}
    except EOFError:
        child.join()
        return row | {"why": f"the process ended with {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def _child(model_type: str, sending: Any) -> None:
    sending.send(try_model(model_type))
    sending.close()
    os._exit(0)  # not through the parent's atexit handlers


def as_markdown(rows: Sequence[dict[str, str]], version: str) -> str:
    """docs/models.md."""
    count = {status: sum(row["status"] == status for row in rows) for status in ("supported", "refused", "not tried")}
    lines = [
        "# Models",
        "",
        "What the generic path of the worker runs: every decoder-only architecture of transformers whose layers use",
        "its attention interface. Each was tried with a tiny random model in float32: its logits over pages, packed",
        "and in chunks, against transformers' own. The same check runs at every start, on the model that is loaded.",
        f"Written by `python -m tools.sweep_models --write docs/models.md` with transformers {version}:",
        f"{count['supported']} supported, {count['refused']} refused, {count['not tried']} not tried.",
    ]
    for status, title, third in (
        ("supported", "Supported", "Attention"),
        ("refused", "Refused, by name, at start", "Why"),
        ("not tried", "Not tried", "Why"),
    ):
        lines += ["", f"## {title}", "", f"| Model type | Class | {third} |", "|---|---|---|"]
        chosen = sorted((row for row in rows if row["status"] == status), key=lambda row: row["type"])
        lines += [f"| {row['type']} | {row['name']} | {row['why'].replace('|', '/')} |" for row in chosen]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated model types (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="architectures tried at once")
    parser.add_argument("--timeout-s", type=float, default=90.0, help="longest time for one architecture")
    parser.add_argument("--write", type=Path, default=None, help="write the table as Markdown into this file")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers.generation  # noqa: F401  imported once, before the processes fork
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from worker_proc.generic import runner, selfcheck  # noqa: F401

    torch.set_num_threads(1)
    wanted = [name for name in args.only.split(",") if name] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = []
        for row in pool.map(lambda name: run_one(name, args.timeout_s), wanted):
            rows.append(row)
            print(f"{row['type']:24s} {row['status']:10s} {row['why']}", flush=True)
    if args.write:
        args.write.write_text(as_markdown(rows, __version__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
