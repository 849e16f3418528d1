"""How much memory a model's KV cache takes, and how many tokens fit: ``python -m tools.size --model X``.

    KV bytes per token = 2 (K and V) x layers x KV heads x head dimension x bytes per number

Read from config.json alone: no weights, no torch. ``--memory`` is what the worker may use in all;
what the weights leave is the pool. On a CPU server that is the memory free at start, on a GPU
the device's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)(?P<byte>B?)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What of a model decides the size of its KV cache."""

    layers: int
    """Layers that attend (and so keep K and V)."""
    kv_heads: int
    k_dim: int
    """Width of one head's K."""
    v_dim: int
    dtype: str
    context_len: int

    def bytes_per_token(self, dtype: str = "", tp_size: int = 1) -> int:
        """Bytes one token takes on one rank. Heads are split over the ranks, never less than one each."""
        heads = max(1, -(-self.kv_heads // tp_size))
        return self.layers * heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[dtype or self.dtype]


def read_shape(config: Mapping[str, Any]) -> KvShape:
    """The shape from a Hugging Face config.json. Raises ConfigError naming a missing field."""
    text = config.get("text_config", config)
    layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _first(text, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    head_dim = text.get("head_dim") or hidden // heads
    if text.get("kv_lora_rank"):  # the server keeps the expanded K and V, one per query head
        k_dim, v_dim = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["v_head_dim"]
        kv_heads = heads
    else:
        k_dim = v_dim = head_dim
        kv_heads = 1 if text.get("multi_query") else text.get("num_key_value_heads") or heads
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} in config.json: known are {', '.join(DTYPE_BYTES)} (say --dtype)")
    context = text.get("max_position_embeddings") or text.get("n_positions") or 0
    return KvShape(layers, kv_heads, k_dim, v_dim, dtype, context)


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigError(f"config.json has none of {', '.join(names)}: not a decoder-only transformer")


def parse_size(text: str) -> int:
    """``24GiB``, ``24G``, ``500 MB``, ``1048576`` -> bytes. Raises ConfigError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write 24GiB, 800MB or a number of bytes")
    unit = match["unit"].upper()
    base = 1024 ** "BKMGT".index(unit or "B") if match["binary"] else _UNITS[unit]
    return int(float(match["number"]) * base)


def show_size(num_bytes: float) -> str:
    """Bytes in the unit that reads best, binary."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def find_config(model: str) -> Path:
    """config.json of a folder, a file, or a Hugging Face id (fetched, a few KB). Raises ConfigError."""
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(model, "config.json"))
        except Exception as error:
            raise ConfigError(f"--model {model}: config.json could not be fetched: {error}") from None
    raise ConfigError(f"--model {model}: no config.json there (a folder, a config.json, or a Hugging Face id)")


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights beside config.json; 0 when there are none."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def report(shape: KvShape, args: argparse.Namespace, weights: int) -> str:
    """The calculation, line by line."""
    dtype = args.dtype or shape.dtype
    per_token = shape.bytes_per_token(dtype, args.tp_size)
    per_page = per_token * args.page_size
    width = f"({shape.k_dim} + {shape.v_dim})"
    split = f" / {args.tp_size} ranks" if args.tp_size > 1 else ""
    lines = [
        f"KV per token   {shape.layers} layers x {shape.kv_heads} KV heads{split} x {width}"
        f" x {DTYPE_BYTES[dtype]} bytes = {per_token:,} bytes ({show_size(per_token)})",
        f"page           {args.page_size} tokens = {show_size(per_page)}",
    ]
    if shape.context_len:
        longest = show_size(per_token * shape.context_len)
        lines.append(f"one request    {shape.context_len:,} tokens (the model's limit) = {longest}")
    if args.tokens:
        lines.append(f"for the pool   {args.tokens:,} tokens = {show_size(args.tokens * per_token)}")
    if args.memory:
        weights = (args.weights or weights) // args.tp_size
        pool = args.memory - weights
        pages = max(pool, 0) // per_page
        found, rank = "" if weights else " (not found)", " per rank" if args.tp_size > 1 else ""
        lines += [
            f"memory         {show_size(args.memory)} - {show_size(weights)} weights{found}"
            f" = {show_size(pool)} for the pool{rank}",
            f"fits           {pages:,} pages = {pages * args.page_size:,} tokens",
            *(
                f"               {pages * args.page_size // n:,} requests of {n:,} tokens at once"
                for n in (1024, 4096, 16384)
                if pages * args.page_size >= n
            ),
        ]
        if pages:
            lines.append(f"flag           --max-total-tokens {pages * args.page_size}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.size", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True, help="folder, config.json, or Hugging Face id")
    parser.add_argument("--memory", default="", help="memory for weights and pool together, per rank: 24GiB")
    parser.add_argument("--weights", default="", help="bytes of the weights, where they are not beside config.json")
    parser.add_argument("--tokens", type=int, default=0, help="the other way round: memory for this many tokens")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="", help="default: the model's own")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tp-size", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        if args.page_size < 1 or args.tp_size < 1 or args.tokens < 0:
            raise ConfigError("--page-size and --tp-size must be at least 1, --tokens at least 0")
        args.memory = parse_size(args.memory) if args.memory else 0
        args.weights = parse_size(args.weights) if args.weights else 0
        path = find_config(args.model)
        config = json.loads(path.read_text(encoding="utf-8"))
        print(report(read_shape(config), args, weight_bytes(path.parent)))
    except (ConfigError, json.JSONDecodeError) as error:
        print(f"tools.size: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
