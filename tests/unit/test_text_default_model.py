"""The default model's own tokenizer, where it is prepared in the user's cache."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from common.config import ModelConfig, ServerConfig
from common.messages import ChatPrompt, Generate, SamplingParams, TextParams, unpack_i32
from detokenizer_proc.decoding import Vocabulary
from detokenizer_proc.main import load_tokenizer
from tokenizer_proc.main import load
from worker_proc.prepare.resolve import find_ready

pytestmark = pytest.mark.model
TEXTS = [
    "plain text",
    "🙂👩‍👩‍👧 emoji 🇩🇪",
    "日本語と中文和한국어",
    "e\u0301 a\u0308\u0323 नमस्ते",
    "\x00\ufffd",
    "tabs\t\n\n",
    "",
]


@pytest.fixture(scope="module")
def config() -> ServerConfig:
    found = find_ready(ModelConfig())
    if found is None:
        pytest.skip("the default model is not in the cache: start the server once")
    return ServerConfig(model_dir=str(found.folder))


def test_streamed_text_equals_the_tokenizers_own(config: ServerConfig) -> None:
    tokenizer: Tokenizer = load_tokenizer(config)
    vocabulary = Vocabulary(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        for cut in range(len(ids) + 1):
            decoder = vocabulary.decoder(True)
            assert "".join(map(decoder.push, ids[:cut])) + decoder.flush() == tokenizer.decode(ids[:cut])


def test_a_chat_is_encoded_as_transformers_does(config: ServerConfig) -> None:
    from transformers import AutoTokenizer

    preparer, ready = load(config, 0)
    assert ready.has_chat_template
    reference = AutoTokenizer.from_pretrained(config.model_dir)
    for text in TEXTS:
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "?"},
        ]
        out = preparer.prepare(
            Generate(
                rid="r", gateway="g", prompt=ChatPrompt(messages=messages), sampling=SamplingParams(), text=TextParams()
            )
        )
        expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert unpack_i32(out.input_ids).tolist() == expected
        assert out.eos_token_ids == (2,)
