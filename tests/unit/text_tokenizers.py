"""Small tokenizers of each family, made in memory: what the text tests run on."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog.", "Where is the station? It is over there, by the river.",
    "to be or not to be, that is the question", "Grüße aus Köln, schöne Straße", "日本語の文章です。東京は大きい",
    "crème brûlée à la carte", "for i in range(10): print(i)", "🙂 smile 👩‍👩‍👧 family",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json(vocab_size: int = 400) -> str:
    """Byte-level BPE with three control tokens and one added token that is none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return str(tokenizer.to_str())


@cache
def llama_json() -> str:
    """SentencePiece-style BPE: blanks as ``▁``, byte fallback, a BOS token, the first blank dropped in decoding."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([line for line in CORPUS if line.isascii()] * 3, trainer)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    spec["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[bos])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return str(tokenizer.to_str())


@cache
def unigram_json(prepend_scheme: str = "first") -> str:
    """Unigram with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return str(tokenizer.to_str())


@cache
def word_end_json() -> str:
    """BPE whose tokens mark the ends of words: a decoder that is not followed token by token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return str(tokenizer.to_str())


@cache
def unigram_bytes_json() -> str:
    """Unigram with byte tokens, whose decoder puts the bytes together before it looks at blanks."""
    spec = json.loads(unigram_json())
    vocab = spec["model"]["vocab"]
    vocab.extend([f"<0x{byte:02X}>", -20.0] for byte in range(256))
    spec["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return str(tokenizer.to_str())


FAMILIES = {
    "byte_level": byte_level_json,
    "llama": llama_json,
    "unigram": unigram_json,
    "unigram_never": lambda: unigram_json("never"),
    "unigram_bytes": unigram_bytes_json,
    "word_end": word_end_json,
}


def load(family: str) -> Tokenizer:
    """A fresh tokenizer of one of ``FAMILIES``."""
    return Tokenizer.from_str(FAMILIES[family]())
