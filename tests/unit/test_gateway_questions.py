"""Questions a gateway asks the engine: what an answer that refuses becomes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import RequestError
from common.messages import ErrorInfo, TextReply
from gateway.questions import Questions


class _Tokenizer:
    """Refuses whatever it is sent, as a tokenizer that is full does."""

    questions: Questions

    def send(self, message: Any) -> bool:
        error = ErrorInfo(status=503, message="busy", code="tokenizer_full", retry_after_s=7.0)
        asyncio.get_running_loop().call_soon(self.questions.take, TextReply(request_id=message.request_id, error=error))
        return True


def test_a_refusal_keeps_its_status_its_code_and_when_to_come_again() -> None:
    tokenizer: Any = _Tokenizer()
    tokenizer.questions = Questions("gateway-0", tokenizer, [tokenizer], lambda: None)
    with pytest.raises(RequestError) as caught:
        asyncio.run(tokenizer.questions.detokenize(b""))
    assert caught.value.info == ErrorInfo(status=503, message="busy", code="tokenizer_full", retry_after_s=7.0)
