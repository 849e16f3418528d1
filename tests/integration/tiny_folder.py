"""A tiny random Llama as a model folder: safetensors, a small byte-level BPE tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.", "Where is the station? It is over there, by the river.",
    "{\"name\": \"value\", \"number\": 12, \"list\": [true, false, null]}", "un deux trois quatre cinq six sept",
    "to be or not to be, that is the question", "for i in range(10): print(i)", "Grüße aus Köln, schöne Straße",
]  # fmt: skip


def make_tiny_folder(folder: Path, seed: int = 7, special: Sequence[str] = (), plain: Sequence[str] = ()) -> Path:
    """Fill ``folder`` with the model (float32, about 100,000 parameters); returns it. Same arguments, same bytes.

    ``special``, ``plain``: more tokens of their own, those that ``skip_special_tokens`` hides and those it does not.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, special, plain)
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # clear winners: greedy choices that are not near ties
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path, more: Sequence[str], plain: Sequence[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(plain), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[1], "eos_token": special[2], "pad_token": special[0]}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
