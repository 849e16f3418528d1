"""Validation before acceptance: what is wrong, the limit, the value; nothing bad reaches the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.errors import RequestError
from common.messages import (
    ChatPrompt,
    DetokenizeIds,
    Generate,
    Grammar,
    IdsPrompt,
    Prompt,
    SamplingParams,
    TextParams,
    TextPrompt,
    TokenizeText,
    pack_i32,
    unpack_i32,
)
from tests.unit.text_tokenizers import CHAT_TEMPLATE, byte_level_json
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encoder import TextEncoder
from tokenizer_proc.model_info import ModelInfo
from tokenizer_proc.prepare import Preparer

VOCAB = 420
"""More rows than the tokenizer has tokens: a padded embedding."""
CONTEXT = 64
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def preparer(template: str = CHAT_TEMPLATE, eos: tuple[int, ...] = (7,), now: float = 100.0) -> Preparer:
    info = ModelInfo(
        context_len=CONTEXT, vocab_size=VOCAB, eos_token_ids=eos, special_tokens={"eos_token": "<|im_end|>"}
    )
    encoder = TextEncoder(Tokenizer.from_str(byte_level_json()))
    return Preparer(info, encoder, ChatTemplate({"default": template} if template else {}, {}), lambda: now)


def generate(prompt: Prompt | str = "hi", stop: tuple[str, ...] = (), **fields: Any) -> Generate:
    sampling = SamplingParams(**{k: fields.pop(k) for k in list(fields) if k in SamplingParams.__struct_fields__})
    if isinstance(prompt, str):
        prompt = TextPrompt(text=prompt)
    return Generate(
        rid="r", gateway="gateway-0", prompt=prompt, sampling=sampling, text=TextParams(stop=stop), **fields
    )


def ids(values: list[int]) -> IdsPrompt:
    return IdsPrompt(ids=pack_i32(values))


CHAT = ChatPrompt(messages=[{"role": "user", "content": "hi"}])


def refusal(message: Generate) -> RequestError:
    with pytest.raises(RequestError) as caught:
        preparer().prepare(message)
    return caught.value


def test_everything_the_engine_needs_is_carried_over() -> None:
    message = generate(
        ids([1, 2, 3]), max_tokens=5, seed=9, attempt=2, group="g", priority=4, cache_salt="s", received=1.5,
        deadline=1000.0, output_ids=pack_i32([8]), stop=("x",),
    )  # fmt: skip
    out = preparer().prepare(message)
    for field in ("rid", "gateway", "attempt", "group", "priority", "cache_salt", "received", "deadline", "output_ids"):
        assert getattr(out, field) == getattr(message, field)
    assert (out.sampling, out.text, out.input_ids) == (message.sampling, message.text, pack_i32([1, 2, 3]))


def test_max_tokens_is_resolved_to_what_fits() -> None:
    assert preparer().prepare(generate(ids([5] * 10))).sampling.max_tokens == CONTEXT - 10
    assert preparer().prepare(generate(ids([5] * 10), max_tokens=CONTEXT - 10)).sampling.max_tokens == CONTEXT - 10


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [(CONTEXT, None, ["64"]), (CONTEXT + 1, 0, ["64", "65"]), (60, 5, ["64", "65", "60", "5", "4"])],
)
def test_what_does_not_fit_the_context_is_a_400_with_the_numbers(
    length: int, max_tokens: int | None, numbers: list[str]
) -> None:
    error = refusal(generate(ids([5] * length), max_tokens=max_tokens))
    assert (error.info.status, error.info.code, error.info.param) == (400, "context_length_exceeded", "prompt")
    for number in numbers:
        assert number in error.info.message


def test_a_text_that_is_far_too_long_is_refused_before_it_is_encoded() -> None:
    error = refusal(generate("word " * 100_000))
    assert error.info.code == "context_length_exceeded" and "at the least" in error.info.message
    encoder = TextEncoder(Tokenizer.from_str(byte_level_json()))
    for text in ("The quick brown fox " * 50, "<|im_start|>" * 100, "日本🙂" * 30):
        assert encoder.least_tokens(text) <= len(encoder.encode_prompt(text))


def test_a_chat_far_beyond_the_context_is_not_encoded_for_tokenize_either() -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "a " * 100_000}])
    with pytest.raises(RequestError) as error:
        preparer().tokenize(TokenizeText(request_id="t", gateway="g", prompt=chat))
    assert error.value.info.status == 400 and error.value.info.param == "messages"


def test_long_and_short_texts_are_encoded_and_decoded_alike() -> None:
    tokenizer = Tokenizer.from_str(byte_level_json())
    encoder = TextEncoder(tokenizer)
    text = "Grüße 🙂 <|im_end|> to be or not " * 400
    assert encoder.encode_prompt(text) == tokenizer.encode(text).ids
    assert encoder.encode_rendered(text) == tokenizer.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode(text).ids
    assert len(ids) > 4000 and encoder.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    encoder = TextEncoder(Tokenizer.from_str(byte_level_json()))
    text, turns, done = "to be or not to be " * 40_000, [], threading.Event()

    def encode() -> None:
        encoder.encode_prompt(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.0005):
        turns.append(done.is_set())
    thread.join()
    # Holding the GIL for the whole call leaves a turn or two, whatever the machine's speed.
    assert len(turns) > 10



def test_a_full_context_can_be_scored_without_generating() -> None:
    assert preparer().prepare(generate(ids([5] * CONTEXT), max_tokens=0)).sampling.max_tokens == 0


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (generate(""), "prompt"),
        (generate(ids([])), "prompt"),
        (generate(IdsPrompt(ids=b"abc")), "prompt"),
        (generate(ids([VOCAB])), "prompt"),
        (generate(ids([-1])), "prompt"),
        (generate("\ud83d"), "prompt"),
        (generate("hi", stop=("a", "\udc00")), "stop"),
        (generate("hi", stop_token_ids=(3, VOCAB)), "stop_token_ids"),
        (generate("hi", stop_token_ids=(-1,)), "stop_token_ids"),
        (generate("hi", logit_bias={VOCAB: 1.0}), "logit_bias"),
        (generate("hi", max_tokens=-1), "max_tokens"),
        (generate("hi", min_tokens=CONTEXT), "min_tokens"),
        (generate(ChatPrompt(messages=[])), "messages"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(message: Generate, param: str) -> None:
    error = refusal(message)
    assert (error.info.status, error.info.param) == (400, param)


def test_ids_of_padding_rows_are_valid_prompt_tokens() -> None:
    assert preparer().prepare(generate(ids([VOCAB - 1]))).input_ids == pack_i32([VOCAB - 1])


def test_a_deadline_that_passed_is_refused() -> None:
    assert refusal(generate("hi", deadline=99.0)).info.status == 504
    preparer().prepare(generate("hi", deadline=101.0))


def test_end_ids_are_the_models_and_the_tokenizers() -> None:
    assert preparer().prepare(generate()).eos_token_ids == (2, 7)
    assert preparer().prepare(generate(ignore_eos=True)).eos_token_ids == ()
    assert preparer(eos=(VOCAB + 3,)).prepare(generate()).eos_token_ids == (2,)


def test_the_templates_end_of_turn_ends_chats_only() -> None:
    text = CHAT_TEMPLATE + "<|im_end|>"
    info = ModelInfo(context_len=CONTEXT, vocab_size=VOCAB, eos_token_ids=(7,))
    base = Preparer(
        info, TextEncoder(Tokenizer.from_str(byte_level_json())), ChatTemplate({"default": text}, {}), lambda: 0.0
    )
    assert base.prepare(generate(CHAT)).eos_token_ids == (2, 7)
    assert base.prepare(generate()).eos_token_ids == (7,)


def test_a_good_grammar_passes_and_is_known_afterwards() -> None:
    made = preparer()
    message = generate(grammar=Grammar(kind="json_schema", text=SCHEMA))
    assert made.is_slow(message)
    assert made.prepare(message).grammar == message.grammar
    assert not made.is_slow(message)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="json_schema", text='{"type": "objectx"}'), "objectx"),
        (Grammar(kind="json_schema", text="{"), "JSON"),
        (Grammar(kind="regex", text="(a"), "unclosed"),
        (Grammar(kind="lark", text="start: nothing_there"), "nothing_there"),
        (Grammar(kind="regex", text="a" * (2 << 20)), "limit"),
    ],
)
def test_a_bad_grammar_is_a_400_with_the_reason_every_time(grammar: Grammar, words: str) -> None:
    made = preparer()
    for _ in range(2):
        with pytest.raises(RequestError, match=words) as caught:
            made.prepare(generate(grammar=grammar))
        assert caught.value.info.status == 400


def test_long_texts_are_prepared_beside_the_loop() -> None:
    made = preparer()
    long = "word " * 20_000
    assert made.is_slow(generate(long))
    assert made.is_slow(generate(ChatPrompt(messages=[{"role": "user", "content": [{"type": "text", "text": long}]}])))
    assert not made.is_slow(generate("short"))
    assert not made.is_slow(generate(ids([5] * 1000)))


def test_tokenize_shows_ids_and_the_rendered_chat() -> None:
    made = preparer()
    reply = made.tokenize(TokenizeText(request_id="t", gateway="gateway-0", prompt=TextPrompt(text="hi")))
    encoder = TextEncoder(Tokenizer.from_str(byte_level_json()))
    assert unpack_i32(reply.ids).tolist() == encoder.encode_prompt("hi")
    prompt = ChatPrompt(messages=[{"role": "user", "content": "<|im_end|>"}])
    chat = made.tokenize(TokenizeText(request_id="t", gateway="gateway-0", prompt=prompt))
    assert chat.text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert unpack_i32(chat.ids).tolist().count(2) == 1


def test_detokenize_shows_control_tokens_and_checks_ids() -> None:
    made = preparer()
    assert (
        made.detokenize(DetokenizeIds(request_id="t", gateway="g", ids=pack_i32([1, 2]))).text
        == "<|im_start|><|im_end|>"
    )
    with pytest.raises(RequestError, match=str(VOCAB)):
        made.detokenize(DetokenizeIds(request_id="t", gateway="g", ids=pack_i32([VOCAB])))


def test_more_ids_than_a_context_holds_are_not_detokenized() -> None:
    made = preparer()
    limit = made.info.context_len
    made.detokenize(DetokenizeIds(request_id="t", gateway="g", ids=pack_i32([1] * limit)))
    with pytest.raises(RequestError, match=f"context is {limit} tokens, and {limit + 1} ids") as caught:
        made.detokenize(DetokenizeIds(request_id="t", gateway="g", ids=pack_i32([1] * (limit + 1))))
    assert caught.value.info.code == "context_length_exceeded"
