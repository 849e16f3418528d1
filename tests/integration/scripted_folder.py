"""A tiny Llama that says one thing: greedy decoding gives a fixed text, whatever the prompt's last token led to.

Attention and feed-forward parts add nothing, so the next token is a function of the last one alone, and
the head's weights are chosen to make that function the successor in the text. So no token may come twice.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.integration.tiny_folder import make_tiny_folder


def make_scripted_folder(folder: Path, last_of_prompt: str, text: str) -> Path:
    """Behind a prompt that ends with the token ``last_of_prompt``, the model says ``text`` and ends."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    make_tiny_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = int(json.loads((folder / "config.json").read_text())["eos_token_id"])
    (start,) = tokenizer.encode(last_of_prompt, add_special_tokens=False).ids
    chain = [start, *tokenizer.encode(text, add_special_tokens=False).ids, end]
    if len(set(chain)) != len(chain):
        raise ValueError(f"{text!r} has a token twice: {[tokenizer.id_to_token(i) for i in chain]}")
    weights = load_file(folder / "model.safetensors")
    embedding = torch.nn.functional.normalize(weights["model.embed_tokens.weight"].double(), dim=-1)
    head = torch.zeros_like(embedding)
    for token, successor in itertools.pairwise(chain):
        head[successor] = 8 * embedding[token]
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weight)
    weights |= {"model.embed_tokens.weight": embedding.float(), "lm_head.weight": head.float()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
