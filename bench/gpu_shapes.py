"""What the GPU benchmark serves: a model's shape with random weights, and the mixed prompts of the workload."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN2_5_7B: dict[str, Any] = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TINY: dict[str, Any] = QWEN2_5_7B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """The workload: half of the prompts short, half long, so many at a time."""

    num_requests: int
    short_len: int
    long_len: int
    shared_len: int
    """Tokens that all prompts begin with, in the variant with a shared prefix."""
    new_tokens: int
    concurrency: int


SEED_LOAD = Load(500, 64, 1024, 1000, 128, 32)
TINY_LOAD = Load(6, 8, 40, 24, 4, 3)


def prompts(load: Load, vocab_size: int, shared: bool) -> list[list[int]]:
    """Token ids from a fixed seed; ``shared``: the first ``shared_len`` are the same for all."""
    rng = random.Random(7)

    def ids(count: int) -> list[int]:
        return [rng.randrange(300, vocab_size) for _ in range(count)]

    prefix = ids(load.shared_len) if shared else []
    return [prefix + ids(load.short_len if i % 2 else load.long_len) for i in range(load.num_requests)]


def write_folder(folder: Path, shape: dict[str, Any]) -> Path:
    """A model folder without weights (--load-format dummy), with a byte-level tokenizer; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", **shape}
    (folder / "config.json").write_text(json.dumps(config))
    special = ["<|pad|>", "<|begin|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    # Ids past the letters are words of their own, so that every id that is drawn has a text.
    tokenizer.add_tokens([f" w{i}" for i in range(len(special) + len(letters), shape["vocab_size"])])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[1], "eos_token": special[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
