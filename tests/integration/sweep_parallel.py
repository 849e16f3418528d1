"""Try every architecture of docs/models.md on two ranks, and write which are split rightly into docs/parallel.md.

    python -m tests.integration.sweep_parallel [--only llama,mixtral] [--write docs/parallel.md]

A tiny random model in float32 each: the logits of two ranks against those of transformers on one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.parallel_ranks import Job, Ranks

ROOT = Path(__file__).resolve().parents[2]
IDS = [7, 9, 11, 30, 100, 105, 200, 3, 5, 8, 13, 21, 34, 55, 89, 144]
TOLERANCE = 1e-3
"""Relative error of the logits; a wrong split gives 0.1 and more."""
MARK = "## Which models\n"
MOST_PARAMETERS = 30_000_000


def supported_types() -> list[str]:
    """Model types of the first table in docs/models.md."""
    table = (ROOT / "docs" / "models.md").read_text().split("## Supported")[1].split("## ")[0]
    rows = re.findall(r"^\| (\S+) \| \S+ \|", table, re.M)
    return [name for name in rows if re.fullmatch(r"[\w.-]*[a-z][\w.-]*", name)]


def make_model(model_type: str) -> Any:
    """A tiny model whose norms and biases matter too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.sweep_models import AS_RELEASED, shrink

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type)
    for field, value in AS_RELEASED.get(model_type, {}).items():
        setattr(config, field, value)
    shrink(config.get_text_config())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def try_model(ranks: Ranks, model_type: str) -> tuple[str, str]:
    """(``split`` | ``refused`` | ``wrong`` | ``not tried``, details)."""
    import torch
    from transformers import AutoConfig

    folder = tempfile.mkdtemp()
    try:
        model = make_model(model_type)
        whole = sum(parameter.numel() for parameter in model.parameters())
        if whole > MOST_PARAMETERS:
            return "not tried", "its config could not be made small"
        model.save_pretrained(folder)
        AutoConfig.from_pretrained(folder)  # some shrunken configs cannot be read back
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            want = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1].float().numpy()
        answers = ranks.run(Job(folder, [IDS], chunk=1000))
    except Exception as error:
        return "not tried", _line(f"transformers cannot run or store a shrunken config: {error}")
    finally:
        shutil.rmtree(folder)
    if errors := [answer.error for answer in answers if answer.error]:
        return "refused", _line(re.sub(rf"^ConfigError: |--tp-size 2: |{re.escape(folder)}: ", "", errors[0]))
    error = float(np.linalg.norm(answers[0].logits[0] - want) / np.linalg.norm(want))
    if error > TOLERANCE or not np.array_equal(answers[0].logits, answers[1].logits):
        return "wrong", f"relative error {error:.2g}"
    held = sum(answer.num_parameters for answer in answers) / whole
    heads = "split" if answers[0].num_kv_heads < _kv_heads(model) else "whole"
    return "split", f"{held:.2f} | {heads}"


def _kv_heads(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:160]


def render(results: dict[str, tuple[str, str]]) -> str:
    """The section of the document."""
    import transformers

    kinds = ("split", "wrong", "refused", "not tried")
    groups = {kind: {n: details for n, (k, details) in results.items() if k == kind} for kind in kinds}
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in groups.items())
    out = [
        MARK,
        "Tiny random models in float32 on two ranks (gloo): their logits against transformers' own on one, relative",
        f"error below {TOLERANCE:g}. *Held*: parameters of both ranks together, 1 being one model. *K/V*: whole where",
        "every rank attends with all heads. Written by",
        "`python -m tests.integration.sweep_parallel --write docs/parallel.md`",
        f"with transformers {transformers.__version__}: {counts}.\n",
        "| Model type | Held | K/V |\n|---|---|---|",
        *[f"| {name} | {details} |" for name, details in groups["split"].items()],
    ]
    for kind in kinds[1:]:
        if groups[kind]:
            out += [f"\n| {kind.capitalize()} | Why |\n|---|---|"]
            out += [f"| {name} | {details} |" for name, details in groups[kind].items()]
    return "\n".join(out) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--write", type=Path, help="the document whose last section is replaced")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    run_dir = Path(tempfile.mkdtemp())
    ranks = Ranks(run_dir)
    results = {}
    for model_type in args.only.split(",") if args.only else supported_types():
        results[model_type] = try_model(ranks, model_type)
        print(model_type, *results[model_type], flush=True)
    ranks.close()
    shutil.rmtree(run_dir)
    if args.write:
        args.write.write_text(args.write.read_text().split(MARK)[0].rstrip() + "\n\n" + render(results))


if __name__ == "__main__":
    main()
