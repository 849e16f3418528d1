"""A ``Generate`` becomes a ``Tokenized``, or is refused with the limit and the value.

Everything that can be said without the engine is said here, before the request is accepted: the
prompt, the lengths, the ids, the template, the grammar.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from common.errors import RequestError
from common.messages import (
    ChatPrompt,
    DetokenizeIds,
    Generate,
    IdsPrompt,
    Prompt,
    TextPrompt,
    TextReply,
    Tokenized,
    TokenizeText,
    pack_i32,
    unpack_i32,
)
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.control_tokens import check_text
from tokenizer_proc.encoder import TextEncoder
from tokenizer_proc.grammar_check import GrammarChecker
from tokenizer_proc.model_info import ModelInfo
from tokenizer_proc.sampling_check import check_sampling

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
    "<|end|>",
    "<|EOT|>",
    "<|return|>",
    "<|call|>",
)
"""Tokens that end an assistant's turn in the templates in use."""
_SLOW_CHARS = 40_000
"""A longer text is encoded beside the loop: it takes more than a few milliseconds."""


class Preparer:
    """Validates and encodes for one model. Holds no request; safe to use from several threads."""

    def __init__(
        self,
        info: ModelInfo,
        encoder: TextEncoder,
        template: ChatTemplate,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.info = info
        self._encoder = encoder
        self._template = template
        self._clock = clock
        self._eos = _with_tokenizer_eos(info, encoder)
        self._chat_eos = tuple(sorted({*self._eos, *_turn_ends(template, encoder)}))
        self._grammars = GrammarChecker(encoder, self._eos)

    def warm_up(self) -> None:
        """Make what the first request that needs it would otherwise wait for."""
        self._encoder.encode_rendered("", guarded=True)

    def is_slow(self, message: Generate | TokenizeText | DetokenizeIds) -> bool:
        """Preparing takes long enough that others should not wait for it."""
        if isinstance(message, DetokenizeIds):
            return len(message.ids) > 4 * _SLOW_CHARS
        if isinstance(message, Generate) and message.grammar is not None and not self._grammars.known(message.grammar):
            return True
        return _size_of(message.prompt) > _SLOW_CHARS

    def prepare(self, message: Generate) -> Tokenized:
        """Validate and encode.

        Raises:
            RequestError: with the HTTP status, the limit, the value and the way out.
        """
        if message.deadline is not None and self._clock() >= message.deadline:
            raise RequestError("the request's deadline passed before it was tokenized", status=504, code="deadline")
        ids = self._encode(message.prompt)
        if not ids:
            raise RequestError(
                "the prompt is empty: it must hold at least one token",
                param=_param(message.prompt),
                code="empty_prompt",
            )
        sampling = message.sampling
        check_sampling(sampling, self.info.vocab_size)
        self._given_ids(message.output_ids, "output_ids")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.logit_bias, "logit_bias")
        for stop in message.text.stop:
            check_text(stop, "stop")
        max_tokens = self._max_tokens(len(ids), sampling.max_tokens, _param(message.prompt))
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens can be generated",
                param="min_tokens",
            )
        if message.grammar is not None:
            self._grammars.check(message.grammar)
        eos = self._chat_eos if isinstance(message.prompt, ChatPrompt) else self._eos
        return Tokenized(
            rid=message.rid,
            gateway=message.gateway,
            attempt=message.attempt,
            group=message.group,
            input_ids=pack_i32(ids),
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            eos_token_ids=() if sampling.ignore_eos else eos,
            text=message.text,
            grammar=message.grammar,
            priority=message.priority,
            cache_salt=message.cache_salt,
            deadline=message.deadline,
            received=message.received,
            output_ids=message.output_ids,
        )

    def tokenize(self, message: TokenizeText) -> TextReply:
        """Answer /tokenize. Raises ``RequestError``."""
        if isinstance(message.prompt, ChatPrompt):
            rendered, guarded = self._template.render(message.prompt, self._encoder.control)
            self._check_size(rendered, "messages")
            ids = self._encoder.encode_rendered(rendered, guarded)
            text = self._encoder.control.unguard(rendered) if guarded else rendered
            return TextReply(request_id=message.request_id, ids=pack_i32(ids), text=text)
        return TextReply(request_id=message.request_id, ids=pack_i32(self._encode(message.prompt)))

    def detokenize(self, message: DetokenizeIds) -> TextReply:
        """Answer /detokenize; control tokens are shown. Raises ``RequestError``."""
        ids, limit = self._given_ids(message.ids, "tokens"), self.info.context_len
        if len(ids) > limit:
            raise RequestError(
                f"this model's context is {limit} tokens, and {len(ids)} ids were sent: send them in parts",
                param="tokens",
                code="context_length_exceeded",
            )
        return TextReply(request_id=message.request_id, text=self._encoder.decode(ids, skip_special_tokens=False))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, IdsPrompt):
            return self._given_ids(prompt.ids, "prompt")
        if isinstance(prompt, TextPrompt):
            check_text(prompt.text, "prompt")
            self._check_size(prompt.text, "prompt")
            return self._encoder.encode_prompt(prompt.text, prompt.add_special_tokens) if prompt.text else []
        rendered, guarded = self._template.render(prompt, self._encoder.control)
        self._check_size(rendered, "messages")
        return self._encoder.encode_rendered(rendered, guarded)

    def _check_size(self, text: str, param: str) -> None:
        """Refuse a text that is far too long without encoding it."""
        if len(text) <= max(_SLOW_CHARS, self.info.context_len):
            return
        least, limit = self._encoder.least_tokens(text), self.info.context_len
        if least > limit:
            raise RequestError(
                f"this model's context is {limit} tokens, and the prompt alone has {least} at the least: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _given_ids(self, packed: bytes, param: str) -> list[int]:
        if len(packed) % 4:
            raise RequestError(f"'{param}' is not a whole number of int32 ids", param=param)
        ids: list[int] = unpack_i32(packed).tolist()
        self._check_ids(ids, param)
        return ids

    def _check_ids(self, ids: tuple[int, ...] | list[int] | dict[int, float], param: str) -> None:
        if not ids:
            return
        limit = self.info.vocab_size
        if min(ids) < 0 or max(ids) >= limit:
            bad = next(i for i in ids if not 0 <= i < limit)
            raise RequestError(
                f"'{param}' names token id {bad}; the vocabulary has ids 0 to {limit - 1}",
                param=param,
                code="invalid_token_id",
            )

    def _max_tokens(self, prompt_len: int, asked: int | None, param: str) -> int:
        """How many tokens may be generated; raises when prompt and output do not fit the context."""
        limit = self.info.context_len
        if asked is not None and asked < 0:
            raise RequestError(f"max_tokens is {asked}; it must be 0 or more", param="max_tokens")
        room = limit - prompt_len
        if room < 0 or (room == 0 and asked != 0):
            raise RequestError(
                f"this model's context is {limit} tokens, and the prompt alone has {prompt_len}: shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        if asked is None:
            return room
        if asked > room:
            raise RequestError(
                f"this model's context is {limit} tokens, but {prompt_len + asked} were requested "
                f"({prompt_len} in the prompt, {asked} for the completion): "
                f"shorten the prompt or ask for at most {room} tokens",
                param=param,
                code="context_length_exceeded",
            )
        return asked


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _size_of(prompt: Prompt) -> int:
    """Roughly the characters to encode."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, IdsPrompt):
        return len(prompt.ids) // 64
    total = 0
    for message in prompt.messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(str(part.get("text", ""))) for part in content if isinstance(part, dict))
    return total


def _with_tokenizer_eos(info: ModelInfo, encoder: TextEncoder) -> tuple[int, ...]:
    named = info.special_tokens.get("eos_token")
    token_id = encoder.token_id(named) if named else None
    ids = {*info.eos_token_ids, *([] if token_id is None else [token_id])}
    return tuple(sorted(i for i in ids if i < info.vocab_size))


def _turn_ends(template: ChatTemplate, encoder: TextEncoder) -> list[int]:
    """Ids of the tokens with which this model's chat template ends a turn."""
    text = "".join(template.sources.values())
    special = set(encoder.special_texts())
    # In the harmony format <|end|> ends one message of several; <|return|> and <|call|> end the turn.
    skipped = {"<|end|>"} if "<|channel|>" in text else set()
    found = [encoder.token_id(end) for end in _TURN_ENDS if end in text and end in special and end not in skipped]
    return [i for i in found if i is not None]
