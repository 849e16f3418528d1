"""SGLang's /generate: what is asked of log-probabilities, for all prompts or for each; its clients' requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.gateway_live import Live, events, live_gateway

BATCH = ["ab", "cd", "ef"]
INPUT, OUTPUT, INPUT_TOP, OUTPUT_TOP = (
    "input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs",
)  # fmt: skip


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_gateway() as pair:
        yield pair


def metas(live: Live, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """``meta_info`` of each prompt of a batch."""
    body = {"text": BATCH, "sampling_params": {"max_new_tokens": 2}, "stream": stream, **fields}
    reply = live.post("/generate", body)
    assert reply.status_code == 200, reply.text
    if not stream:
        return [one["meta_info"] for one in reply.json()]
    found: dict[int, dict[str, Any]] = {}
    for event in events(reply.text)[:-1]:
        found[event["index"]] = event["meta_info"]
    return [found[index] for index in range(len(BATCH))]


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_of_a_batch_is_asked_for_its_own(live: Live, stream: bool) -> None:
    asked = {"return_logprob": [True, False, True], "logprob_start_len": [0, -1, 1], "top_logprobs_num": [2, None, 0]}
    first, second, third = metas(live, stream, **asked)
    assert [len(top) for top in first[OUTPUT_TOP]] == [2, 2] and len(first[OUTPUT]) == 2
    assert first[INPUT] == [[None, ord("a"), None], [-0.5, ord("b"), None]]
    assert not {INPUT, OUTPUT, INPUT_TOP, OUTPUT_TOP} & second.keys()
    assert third[INPUT] == [[-0.5, ord("f"), None]] and third[OUTPUT_TOP] == [None, None]
    sent = {message.prompt.text: message.sampling for message in live.engine.generates[-3:]}  # type: ignore[union-attr]
    assert [(sent[text].logprobs, sent[text].prompt_logprobs) for text in BATCH] == [(2, 2), (None, None), (0, 0)]


@pytest.mark.parametrize("stream", [False, True])
def test_one_value_is_for_all_prompts_beside_lists_with_n(live: Live, stream: bool) -> None:
    asked = {"return_logprob": True, "logprob_start_len": [-1, 0, -1], "top_logprobs_num": 1}
    assert [INPUT in meta for meta in metas(live, stream, **asked)] == [False, True, False]
    asked = {"return_logprob": [True, False, True], "top_logprobs_num": 1}
    assert [OUTPUT in meta for meta in metas(live, stream, **asked)] == [True, False, True]
    body = {"text": ["ab", "cd"], "sampling_params": {"n": 2}, "return_logprob": [False, True]}
    replies = live.post("/generate", body).json()
    assert [OUTPUT in reply["meta_info"] for reply in replies] == [False, False, True, True]


def test_lists_beside_lists_of_sampling_params(live: Live) -> None:
    params = [{"max_new_tokens": number} for number in (1, 2, 3)]
    found = metas(live, False, sampling_params=params, return_logprob=[False, True, True])
    assert [len(meta.get(OUTPUT, ())) for meta in found] == [0, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_logprob": [True]}, "return_logprob"),
        ({"return_logprob": []}, "return_logprob"),
        ({"return_logprob": [True, 1, False]}, "return_logprob"),
        ({"return_logprob": True, "logprob_start_len": [0, 0]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": [0, -2, 0]}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": [0, 0, 21]}, "top_logprobs_num"),
        ({"return_logprob": [True, False, True], "top_logprobs_num": [1, 1, 1]}, "top_logprobs_num"),
        ({"return_logprob": [False, False, False], "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"top_logprobs_num": [0, 2, 0]}, "top_logprobs_num"),
    ],
)
def test_lists_that_do_not_fit_are_400_and_named(live: Live, fields: dict[str, Any], param: str) -> None:
    refused = live.post("/generate", {"text": BATCH, **fields})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_a_list_of_one_is_for_one_prompt(live: Live) -> None:
    reply = live.post("/generate", {"text": "ab", "return_logprob": [True], "logprob_start_len": [1]}).json()
    assert reply["meta_info"][INPUT] == [[-0.5, ord("b"), None]]


def test_the_request_of_sglangs_own_benchmark_is_taken(live: Live) -> None:
    """``sglang.bench_serving`` names what it does not use, too."""
    body = {
        "text": "hi", "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}, "stream": True,
        "lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
        "image_data": None,
    }  # fmt: skip
    reply = live.post("/generate", body)
    assert reply.status_code == 200, reply.text
    last = events(reply.text)[-2]
    assert last["text"] == "Hello" and last["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_give_the_prompts_log_probabilities_alone(live: Live, stream: bool) -> None:
    sampling = [{"max_new_tokens": 0}, {"max_new_tokens": 1}, {"max_new_tokens": 0}]
    body = {"text": BATCH, "sampling_params": sampling, "stream": stream, "return_logprob": True,
            "logprob_start_len": 0}  # fmt: skip
    reply = live.post("/generate", body)
    states = events(reply.text)[:-1] if stream else reply.json()
    last = {state["index"]: state for state in states}
    for index, num in enumerate((0, 1, 0)):
        meta = last[index]["meta_info"]
        assert len(last[index]["output_ids"]) == len(meta[OUTPUT]) == meta["completion_tokens"] == num
        assert len(meta[INPUT]) == 2 and meta["finish_reason"] == {"type": "length", "length": num}
        assert bool(last[index]["text"]) is bool(num)


def test_no_new_tokens_and_no_log_probabilities_compute_the_prompt_for_the_cache(live: Live) -> None:
    reply = live.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 0}}).json()
    assert (reply["text"], reply["output_ids"], reply["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert live.engine.generates[-1].sampling.max_tokens == 1, "the scheduler would leave the prompt alone"


def test_a_bias_reaches_the_engine(live: Live) -> None:
    live.post("/generate", {"text": "a", "sampling_params": {"logit_bias": {"5": -100}}})
    assert live.engine.generates[-1].sampling.logit_bias == {5: -100.0}
    refused = live.post("/generate", {"text": "a", "sampling_params": {"logit_bias": {"5000": 1}}})
    assert refused.status_code == 400
