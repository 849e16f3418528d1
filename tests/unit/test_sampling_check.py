"""What the tokenizer refuses of sampling parameters, whoever sent them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.errors import RequestError
from common.messages import SamplingParams
from tokenizer_proc.sampling_check import check_sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -1e-9),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 1e300),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),  # 0 as float32
        ("logprobs", -1),
        ("logprobs", 101),
        ("prompt_logprobs", 2**40),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name_and_value(name: str, value: float) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(RequestError) as caught:
        check_sampling(SamplingParams(**fields), vocab_size=100)
    assert caught.value.info.status == 400 and caught.value.info.param == name
    assert name in str(caught.value) and f"{value}" in str(caught.value)


def test_a_bias_that_is_no_number_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        check_sampling(SamplingParams(logit_bias={3: math.nan}), vocab_size=100)


def test_the_ends_of_the_ranges_are_taken() -> None:
    check_sampling(SamplingParams(), vocab_size=100)
    check_sampling(
        SamplingParams(temperature=0.0, top_p=0.0, min_p=1.0, seed=2**63 - 1, logprobs=0, prompt_logprobs=100),
        vocab_size=100,
    )
