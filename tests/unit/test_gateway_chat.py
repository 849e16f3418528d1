"""Chat completions against a fake engine: replies, streams, usage, choices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fake_engine import Script
from common.config import HttpConfig, ModelConfig, ServerConfig
from common.messages import ChatPrompt, Finish
from tests.unit.gateway_live import CHAT, Live, events, joined, live_gateway


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def fixed(text: str) -> str:
    """A stream with its id and time made constant."""
    text = re.sub(r'"id":"chatcmpl-[0-9a-f]{32}"', '"id":"ID"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


HEAD = '"id":"ID","object":"chat.completion.chunk","created":0,"model":"SmolLM2-135M-Instruct"'


def test_whole_reply_has_openais_form(live: Live) -> None:
    body = live.chat().json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "SmolLM2-135M-Instruct",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_stream_golden(live: Live) -> None:
    response = live.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

    def chunk(delta: str, finish: str = "null") -> str:
        choice = '{"index":0,"delta":' + delta + ',"logprobs":null,"finish_reason":' + finish + "}"
        return "data: {" + HEAD + ',"choices":[' + choice + "]}\n\n"

    assert fixed(response.text) == (
        chunk('{"role":"assistant","content":""}')
        + chunk('{"content":"Hel"}')
        + chunk('{"content":"lo"}')
        + chunk('{"content":" world"}')
        + chunk("{}", '"stop"')
        + "data: [DONE]\n\n"
    )


def test_include_usage_gives_a_last_chunk_without_choices(live: Live) -> None:
    chunks = events(live.chat(stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["total_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


def test_continuous_usage_is_in_every_chunk(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(live.chat(stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts[-1] == 3
    assert counts == sorted(counts)


def test_cached_tokens_are_reported(live: Live) -> None:
    with live.script(lambda _: Script(prompt_tokens=100, cached_tokens=96)):
        usage = live.chat().json()["usage"]
    assert usage["prompt_tokens"] == 100
    assert usage["prompt_tokens_details"] == {"cached_tokens": 96}


def test_choices_are_one_rid_each_and_count_the_prompt_once(live: Live) -> None:
    seen = len(live.engine.generates)
    body = live.chat(n=3, seed=5).json()
    sent = live.engine.generates[seen:]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 9
    assert len({generate.rid for generate in sent}) == 3
    assert {generate.group for generate in sent} == {body["id"]}
    seeds = [generate.sampling.seed for generate in sorted(sent, key=lambda generate: generate.rid)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    live.chat(n=3, seed=5)
    again = sorted(live.engine.generates[-3:], key=lambda generate: generate.rid)
    assert [generate.sampling.seed for generate in again] == seeds


def test_a_seed_is_drawn_when_none_is_given(live: Live) -> None:
    first, second = live.sampling().seed, live.sampling().seed
    assert first != second
    assert live.sampling(seed=0).seed == 0
    assert 0 <= live.sampling(seed=-1).seed < 2**63


def test_streamed_choices_are_interleaved_and_whole(live: Live) -> None:
    chunks = events(live.chat(n=2, stream=True).text)
    assert joined(chunks, 0) == joined(chunks, 1) == "Hello world"
    endings = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in endings) == [0, 1]


def test_streamed_text_equals_whole_text_for_hard_characters(live: Live) -> None:
    pieces = ("Tab\t\"quote\" ", "😀", "漢字", "é", "\u2028\n\n", "\\", "�", "data: [DONE]\n\n")
    with live.script(lambda _: Script(pieces=pieces)):
        whole = live.chat().json()["choices"][0]["message"]["content"]
        streamed = joined(events(live.chat(stream=True).text))
    assert whole == streamed == "".join(pieces)


def test_logprobs_in_chat_form(live: Live) -> None:
    body = live.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["Hel", "lo", " world"]
    assert content[0]["bytes"] == list(b"Hel")
    assert len(content[0]["top_logprobs"]) == 2
    chunks = events(live.chat(logprobs=True, top_logprobs=2, stream=True).text)
    streamed = [
        item
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]
    assert streamed == content


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_finish_reasons(live: Live, reason: Any) -> None:
    with live.script(lambda _: Script(finish=Finish(reason=reason))):
        assert live.chat().json()["choices"][0]["finish_reason"] == reason
        assert events(live.chat(stream=True).text)[-2]["choices"][0]["finish_reason"] == reason


def test_max_tokens_under_both_names(live: Live) -> None:
    assert live.sampling(max_tokens=2).max_tokens == 2
    assert live.sampling(max_completion_tokens=2).max_tokens == 2
    assert live.sampling().max_tokens is None
    assert live.chat(max_tokens=2).json()["choices"][0]["finish_reason"] == "length"


def test_every_parameter_reaches_the_engine(live: Live) -> None:
    sent = live.sent(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, min_tokens=1, max_tokens=9, stop=["a", "b"],
        stop_token_ids=[3], include_stop_str_in_output=True, ignore_eos=True, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"7": -100}, skip_special_tokens=False,
        priority=3, cache_salt="me", timeout=60, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        parallel_tool_calls=True, modalities=["text"],
    )  # fmt: skip
    sampling, text = sent.sampling, sent.text
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (1, 9, True)
    assert sampling.stop_token_ids == (3,)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert sampling.logit_bias == {7: -100.0}
    assert (text.stop, text.include_stop_str_in_output, text.skip_special_tokens) == (("a", "b"), True, False)
    assert (sent.priority, sent.cache_salt) == (3, "me")
    assert sent.deadline is not None
    assert 0 < sent.deadline - sent.received <= 60


def test_null_means_default(live: Live) -> None:
    sampling = live.sampling(temperature=None, top_p=None, stop=None, n=None, logit_bias=None, tools=None, seed=None)
    assert (sampling.temperature, sampling.top_p, sampling.logit_bias) == (1.0, 1.0, {})


def test_defaults_come_from_the_model() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    with live_gateway(engine_options={"default_sampling": defaults}) as pair:
        sampling = pair.sampling()
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
        assert pair.sampling(temperature=1).temperature == 1.0


def test_messages_reach_the_template_in_plain_form(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "It is", "refusal": None},
    ]
    sent = live.sent(messages=messages, continue_final_message=True, chat_template_kwargs={"thinking": False})
    prompt = sent.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "It is"},
    ]
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert prompt.template_kwargs == {"thinking": False}


def test_served_names() -> None:
    config = ServerConfig(model=ModelConfig(served_model_name=["big", "small"]), http=HttpConfig(port=0))
    with live_gateway(config=config) as pair:
        assert pair.chat(model="small").json()["model"] == "small"
        assert pair.chat().json()["model"] == "big"
        assert [card["id"] for card in pair.client.get("/v1/models").json()["data"]] == ["big", "small"]
        refused = pair.post("/v1/chat/completions", {"model": "other", "messages": CHAT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
