"""Completions, native generate, tokenize: against a fake engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.messages import Finish, IdsPrompt, TextPrompt, TokenLogprob, pack_i32
from gateway.protocols.openai_completions_reply import LogprobTable
from gateway.request import Delta
from tests.unit.gateway_live import Live, events, live_gateway


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == index)


def test_whole_reply_has_openais_form(live: Live) -> None:
    body = live.complete().json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 10


def test_stream(live: Live) -> None:
    chunks = events(live.complete(stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 3
    assert text_of(chunks) == "Hello world"
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["object"] == "text_completion" for chunk in chunks[:-1])


def test_default_length_is_openais(live: Live) -> None:
    live.complete()
    assert live.engine.generates[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [IdsPrompt(ids=pack_i32([1, 2]))]),
        ([[1], [2, 3]], [IdsPrompt(ids=pack_i32([1])), IdsPrompt(ids=pack_i32([2, 3]))]),
    ],
)
def test_prompt_forms(live: Live, prompt: Any, expected: list[Any]) -> None:
    seen = len(live.engine.generates)
    response = live.complete(prompt=prompt)
    assert response.status_code == 200
    sent = sorted(live.engine.generates[seen:], key=lambda generate: generate.rid)
    assert [generate.prompt for generate in sent] == expected
    assert len(response.json()["choices"]) == len(expected)


def test_several_prompts_with_n_are_numbered_prompt_first(live: Live) -> None:
    with live.script(lambda generate: Script(pieces=(getattr(generate.prompt, "text", "?"),), prompt_tokens=3)):
        body = live.complete(prompt=["a", "b"], n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo(live: Live, stream: bool) -> None:
    response = live.complete(prompt="say: ", echo=True, stream=stream)
    text = text_of(events(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == "say: Hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_ids_shows_their_text(live: Live, stream: bool) -> None:
    response = live.complete(prompt=[72, 105], echo=True, stream=stream)
    text = text_of(events(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == "HiHello world"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0_gives_the_prompt_alone(live: Live, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = live.complete(prompt="Hi", echo=True, max_tokens=0, stream=stream, **options)
    if stream:
        chunks = events(response.text)
        assert text_of(chunks) == "Hi"
        usage, reason = chunks[-2]["usage"], chunks[-3]["choices"][0]["finish_reason"]
    else:
        body = response.json()
        assert body["choices"][0]["text"] == "Hi"
        usage, reason = body["usage"], body["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], reason) == (0, "length")


def merged(response: Any, stream: bool) -> tuple[str, dict[str, list[Any]]]:
    if not stream:
        choice = response.json()["choices"][0]
        return choice["text"], choice["logprobs"]
    table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    chunks = events(response.text)
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            for key, values in (choice["logprobs"] or {}).items():
                table[key] += values
    return text_of(chunks), table


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 16])
def test_echo_with_logprobs_covers_the_prompt(live: Live, stream: bool, max_tokens: int) -> None:
    pieces = ("é", "漢", "!")
    with live.script(lambda _: Script(pieces=pieces)):
        text, table = merged(
            live.complete(prompt="añb", echo=True, logprobs=1, max_tokens=max_tokens, stream=stream), stream
        )
    own = list(pieces) if max_tokens else []
    assert text == "añb" + "".join(own)
    assert table["tokens"] == ["a", "ñ", "b", *own]
    assert table["token_logprobs"] == [None, *[-0.5] * (2 + len(own))]
    assert table["text_offset"] == list(range(3 + len(own)))
    assert table["top_logprobs"][0] is None and table["top_logprobs"][1] == {"ñ": -0.5}


def test_logprobs_0_gives_the_chosen_tokens_alone(live: Live) -> None:
    _, table = merged(live.complete(logprobs=0), False)
    assert table["token_logprobs"] == [-0.5] * 3
    assert table["text_offset"] == [0, 3, 5]
    assert table["top_logprobs"] == [None] * 3


def test_of_tokens_that_read_alike_the_likeliest_is_in_the_table() -> None:
    broken = [("\ufffd", b"\xe2", -0.5), ("a", b"a", -1.5), ("\ufffd", b"\xf0", -2.5)]
    item = TokenLogprob("\ufffd", b"\xf0", -2.5, broken, 7)
    delta = Delta(0, "", pack_i32([7, 7]), [item, item], [], None, pack_i32([0, 1]))
    table = LogprobTable("abc", 3).take(delta)
    assert [list(top.items()) for top in table["top_logprobs"]] == [[("\ufffd", -0.5), ("a", -1.5)]] * 2
    assert (table["token_logprobs"], table["text_offset"]) == ([-2.5] * 2, [3, 4])


def test_native_generate_has_sglangs_form(live: Live) -> None:
    body = live.post(
        "/generate",
        {
            "text": "hi",
            "rid": "r1",
            "sampling_params": {"max_new_tokens": 2, "temperature": 0, "sampling_seed": 4},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
            "return_text_in_logprobs": True,
        },
    ).json()
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("Hello", [100, 101])
    assert (meta["id"], meta["finish_reason"]) == ("r1", {"type": "length", "length": 2})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (7, 2, 0)
    assert meta["output_token_logprobs"] == [[-0.5, 100, "Hel"], [-0.5, 101, "lo"]]
    assert meta["input_token_logprobs"] == [[None, ord("h"), "h"], [-0.5, ord("i"), "i"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, ord("i"), "i"]]]
    assert meta["output_top_logprobs"] == [[[-0.5, 100, "Hel"]], [[-0.5, 101, "lo"]]]
    sampling = live.engine.generates[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 0.0, 4)


def test_native_stream_repeats_the_text_so_far(live: Live) -> None:
    chunks = events(live.post("/generate", {"text": "hi", "stream": True}).text)
    assert [chunk["text"] for chunk in chunks[:-1]][-1] == "Hello world"
    texts = [chunk["text"] for chunk in chunks[:-1]]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_native_batch_is_a_list(live: Live) -> None:
    assert len(live.post("/generate", {"text": ["a", "b"]}).json()) == 2
    assert len(live.post("/generate", {"text": "a", "sampling_params": {"n": 2}}).json()) == 2
    assert isinstance(live.post("/generate", {"input_ids": [1, 2]}).json(), dict)


def test_native_log_probabilities_have_ids_and_no_text_unless_asked_for(live: Live) -> None:
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = live.post("/generate", body).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 100 + i, None] for i in range(3)]
    assert meta["output_top_logprobs"][0] == [[-0.5, 100, None], [-1.5, 1, None]]
    assert meta["input_token_logprobs"] == [[-0.5, ord("i"), None]]
    assert meta["input_top_logprobs"] == [[[-0.5, ord("i"), None], [-1.5, 1, None]]]


def test_native_sampling_params_of_each_prompt(live: Live) -> None:
    params = [{"max_new_tokens": 1, "temperature": 0}, {"max_new_tokens": 2, "sampling_seed": 7, "stop": "x"}, {}]
    replies = live.post("/generate", {"text": ["a", "b", "c"], "sampling_params": params}).json()
    assert [reply["text"] for reply in replies] == ["Hel", "Hello", "Hello world"]
    sent = live.engine.generates[-3:]
    assert [message.sampling.max_tokens for message in sent] == [1, 2, 128]
    assert [message.sampling.temperature for message in sent] == [0.0, 1.0, 1.0]
    assert [message.text.stop for message in sent] == [(), ("x",), ()]
    assert sent[1].sampling.seed == 7 and sent[0].sampling.seed == sent[2].sampling.seed != 7
    twice = live.post("/generate", {"text": ["a"], "sampling_params": [{"n": 2}]}).json()
    assert [reply["index"] for reply in twice] == [0, 1]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ([], "sampling_params"),
        ([{}], "sampling_params"),
        ([{}, {"temperature": 3}], "sampling_params[1].temperature"),
        ([{"unknown": 1}, {}], "sampling_params[0].unknown"),
        ([{}, 5], "sampling_params[1]"),
        ([{"n": 1}, {"n": 2}], "sampling_params"),
    ],
)
def test_native_lists_of_sampling_params_name_the_entry_at_fault(live: Live, params: list[Any], param: str) -> None:
    refused = live.post("/generate", {"text": ["a", "b"], "sampling_params": params})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert f"'{param}'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": ""},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}},
        {"text": "a", "lora_path": "x"},
        {"text": "a", "return_hidden_states": True},
        {"text": "a", "return_hidden_states": 0},
        {"text": "a", "logprob_start_len": 0},
        {"text": "a", "sampling_params": {"unknown": 0}},
        {"text": "a", "image_data": "x"},
        {"text": "a", "top_logprobs_num": 2},
        {"text": "a", "rid": "with blank"},
        {"input_ids": [5000]},
    ],
)
def test_native_bad_fields_are_400(live: Live, body: dict[str, Any]) -> None:
    assert live.post("/generate", body).status_code == 400


def test_tokenize_and_back(live: Live) -> None:
    reply = live.post("/tokenize", {"prompt": "hi"}).json()
    assert reply == {"tokens": [104, 105], "count": 2, "max_model_len": 4096}
    assert live.post("/tokenize", {"prompt": ["a", "bc"]}).json()["count"] == [1, 2]
    assert live.post("/detokenize", {"tokens": [104, 105]}).json()["text"] == "hi"
    assert live.post("/detokenize", {"tokens": [[104], [105]]}).json()["text"] == ["h", "i"]
    assert live.post("/detokenize", {"tokens": [5000]}).status_code == 400
    assert live.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert live.post("/tokenize", {}).status_code == 400


def test_a_chat_is_tokenized_as_it_would_be_asked() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with live_gateway(engine_options={"chat_template": "{{ messages }}"}) as pair:  # it knows no tools
        asked = {"messages": messages, "tools": tools}
        tokens = pair.post("/tokenize", asked).json()["tokens"]
        pair.post("/v1/chat/completions", asked)
        assert "".join(map(chr, tokens)) == str(pair.engine.generates[-1].prompt)
        assert pair.post("/tokenize", {**asked, "tools": [{"type": "function"}]}).status_code == 400


def test_model_card(live: Live) -> None:
    card = live.client.get("/v1/models/SmolLM2-135M-Instruct").json()
    assert (card["object"], card["max_model_len"]) == ("model", 4096)
    assert live.client.get("/v1/models/other/name").status_code == 404


def test_why_a_reply_was_cut_short_is_told_in_every_form(live: Live) -> None:
    words = "the request alone filled the KV cache"
    with live.script(lambda _: Script(finish=Finish("length", message=words))):
        completions = [live.complete().json(), events(live.complete(stream=True).text)[-2]]
        chats = [live.chat().json(), events(live.chat(stream=True).text)[-2]]
        native = live.client.post("/generate", json={"text": "a"}).json()
    for body in (*completions, *chats):
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["finish_message"] == words
    assert native["meta_info"]["finish_reason"]["message"] == words
    assert "finish_message" not in live.complete().json()["choices"][0], "nothing to tell"
