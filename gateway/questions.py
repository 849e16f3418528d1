"""Questions of a gateway that have one answer: an operation of the scheduler, a tokenizer's ids or text.

Nothing of them is kept when a process dies: who asked is told after the time it was willing to wait, and asks again.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from common.channels import Sender
from common.errors import RequestError
from common.messages import Control, ControlReply, DetokenizeIds, Message, Prompt, TextReply, TokenizeText

REPLY_TIMEOUT_S = 30.0


class Questions:
    """What one gateway has asked and waits for. On the event loop's thread.

    ``check_accepting`` raises ``RequestError`` when the engine takes nothing new; tokenizers are asked only past it,
    the scheduler always: how it drains or starts is a question too.
    """

    def __init__(
        self, gateway: str, scheduler: Sender, tokenizers: Sequence[Sender], check_accepting: Callable[[], object]
    ) -> None:
        self._gateway = gateway
        self._scheduler = scheduler
        self._tokenizers = tokenizers
        self._check_accepting = check_accepting
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def control(self, action: Any, *, wait_s: float = REPLY_TIMEOUT_S, **fields: Any) -> ControlReply:
        """Ask the scheduler for an operation; its answer. Raises RequestError 503 without one."""
        request_id = secrets.token_hex(8)
        message = Control(request_id=request_id, gateway=self._gateway, action=action, **fields)
        reply: ControlReply = await self._ask(self._scheduler, request_id, message, "scheduler", wait_s)
        return reply

    async def tokenize(self, prompt: Prompt) -> TextReply:
        """Ids (and rendered text) of a prompt. Raises RequestError as the tokenizer says."""
        request_id = secrets.token_hex(8)
        message = TokenizeText(request_id=request_id, gateway=self._gateway, prompt=prompt)
        return await self._ask_tokenizer(request_id, message)

    async def detokenize(self, ids: bytes) -> TextReply:
        """Text of ids (int32 bytes). Raises RequestError as the tokenizer says."""
        request_id = secrets.token_hex(8)
        message = DetokenizeIds(request_id=request_id, gateway=self._gateway, ids=ids)
        return await self._ask_tokenizer(request_id, message)

    def take(self, answer: TextReply | ControlReply) -> None:
        """An answer has arrived; one that nobody waits for any more is dropped."""
        future = self._waiting.pop(answer.request_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _ask_tokenizer(self, request_id: str, message: Message) -> TextReply:
        self._check_accepting()
        index = zlib.crc32(request_id.encode()) % len(self._tokenizers)
        reply: TextReply = await self._ask(self._tokenizers[index], request_id, message, "tokenizer", REPLY_TIMEOUT_S)
        if reply.error is not None:
            error = reply.error
            raise RequestError(
                error.message, status=error.status, param=error.param, code=error.code,
                retry_after_s=error.retry_after_s,
            )  # fmt: skip
        return reply

    async def _ask(self, sender: Sender, request_id: str, message: Message, role: str, wait_s: float) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            if not sender.send(message):
                raise RequestError(f"the {role}'s queue is full", status=503, code="overloaded", retry_after_s=1)
            async with asyncio.timeout(wait_s):
                return await future
        except TimeoutError:
            raise RequestError(
                f"the {role} did not answer within {wait_s:g} s", status=503, code="engine_silent", retry_after_s=1
            ) from None
        finally:
            self._waiting.pop(request_id, None)
