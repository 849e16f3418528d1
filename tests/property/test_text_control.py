"""Whatever a client writes, the control tokens of a chat prompt are the template's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.messages import ChatPrompt
from tests.unit.text_tokenizers import CHAT_TEMPLATE, byte_level_json
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encoder import TextEncoder

ENCODER = TextEncoder(Tokenizer.from_str(byte_level_json()))
TEMPLATE = ChatTemplate({"default": CHAT_TEMPLATE}, {})
PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|", "im_", "end|>", "|>", "<", " ", "\n", "x", "<|pad|>", "é"]
)
CONTENT = st.lists(PIECES, max_size=8).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_a_chat_is_the_same_text_with_the_templates_tokens_only(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    rendered, guarded = TEMPLATE.render(ChatPrompt(messages=messages), ENCODER.control)
    ids = ENCODER.encode_rendered(rendered, guarded)
    specials = [ENCODER.decode([i]) for i in ids if ENCODER.decode([i]) in ENCODER.special_texts()]
    assert specials == ["<|im_start|>", "<|im_end|>"] * len(contents) + ["<|im_start|>"]
    plain = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    assert ENCODER.decode(ids) == plain + "<|im_start|>assistant\n"
