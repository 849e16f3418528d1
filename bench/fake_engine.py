"""A fake engine behind real channels: tokenizer, scheduler and detokenizer in one thread.

It answers the gateway's messages with text that a script decides, so that the gateway can be
tested and measured without a model. One "token" is one piece of text; ids count up from 100.

    with FakeEngine(run_dir, script) as engine: ...

``script(generate)`` gives a ``Script``: the pieces, how they end, what is refused. With ``auto``
off the test drives each step itself (``step()``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.channels import Channels, Sender
from common.messages import (
    Abort,
    Control,
    ControlReply,
    DetokenizeIds,
    EngineStatus,
    ErrorInfo,
    Finish,
    GatewayLease,
    Generate,
    Message,
    Rejected,
    TextBatch,
    TextPrompt,
    TextReply,
    TextRow,
    TokenizerReady,
    TokenizeText,
    TokenLogprob,
    pack_i32,
    unpack_i32,
)

FIRST_ID = 100
_ENDLESS_STEP_S = 0.002


@dataclass(frozen=True)
class Script:
    """What the fake engine does with one request."""

    pieces: Sequence[str] = ("Hel", "lo", " world")
    finish: Finish = field(default_factory=lambda: Finish(reason="stop"))
    prompt_tokens: int = 7
    cached_tokens: int = 0
    rejected: ErrorInfo | None = None
    """Refused by the tokenizer."""
    refused: Finish | None = None
    """Refused by the scheduler, before acceptance."""
    silent: bool = False
    """Never answered."""
    per_step: int = 1
    """Pieces per step."""
    endless: bool = False
    """The pieces repeat until an Abort."""


@dataclass
class _Running:
    generate: Generate
    script: Script
    sent: int = 0
    offset: int = 0
    begun: bool = False


def hello(_: Generate) -> Script:
    """The default script."""
    return Script()


class FakeEngine:
    """One thread that owns the inboxes of a tokenizer and a scheduler and writes to gateways."""

    def __init__(
        self,
        run_dir: Path,
        script: Callable[[Generate], Script] = hello,
        *,
        auto: bool = True,
        num_tokenizers: int = 1,
        step_s: float = 0.0,
        ready: bool = True,
        vocab_size: int = 1000,
        default_sampling: dict[str, float] | None = None,
        reasoning_parser: str = "",
        tool_parser: str = "",
        chat_template: str = "",
    ) -> None:
        self.script = script
        self.auto = auto
        self.ready = ready
        self.draining = False
        self.silent = False
        """No EngineStatus is sent."""
        self.generations = {"scheduler-0": 0, "detokenizer-0": 0, "worker-0": 0}
        self.generations.update({f"tokenizer-{i}": 0 for i in range(num_tokenizers)})
        self.generates: list[Generate] = []
        self.aborts: list[Abort] = []
        self.controls: list[Control] = []
        self.leases: list[GatewayLease] = []
        self.control_replies: dict[str, ControlReply] = {}
        self.ignore_aborts = False
        self.metrics: dict[str, float] = {}
        self._step_s = step_s
        self._channels = Channels(run_dir)
        self._tokenizers = [self._channels.receiver(f"tokenizer-{i}") for i in range(num_tokenizers)]
        self._scheduler = self._channels.receiver("scheduler")
        self._gateways: dict[str, Sender] = {}
        self._running: dict[str, _Running] = {}
        self._backlog: deque[tuple[str, Message]] = deque()
        self._orders: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ready_message = TokenizerReady(
            generation=0,
            context_len=4096,
            vocab_size=vocab_size,
            has_chat_template=True,
            default_sampling=default_sampling or {},
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            chat_template=chat_template,
        )
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(5)
        self._channels.close()

    # ---------------------------------------------------------------- for tests

    def call(self, order: Callable[[], None]) -> None:
        """Run ``order`` in the engine's thread and wait for it."""
        done = threading.Event()

        def run() -> None:
            order()
            done.set()

        with self._lock:
            self._orders.append(run)
        if not done.wait(5):
            raise TimeoutError("the fake engine does not answer")

    def send(self, message: Message, gateway: str = "gateway-0") -> None:
        """Send any message to a gateway."""
        self.call(lambda: self._to(gateway, message))

    def step(self, times: int = 1) -> None:
        """One decode step of everything that runs."""
        for _ in range(times):
            self.call(self._step)

    def restart(self, role: str, *, forget: bool = True) -> None:
        """As if the supervisor had restarted ``role``: a new generation; what it held is gone."""

        def order() -> None:
            self.generations[role] += 1
            if forget:
                self._running.clear()
            self._status()

        self.call(order)

    # ---------------------------------------------------------------- the thread

    def _loop(self) -> None:
        next_status = 0.0
        while not self._stop:
            self._channels.wait_any([*self._tokenizers, self._scheduler], 0 if self._running and self.auto else 0.01)
            for inbox in (*self._tokenizers, self._scheduler):
                for message in inbox.receive():
                    self._take(message)
            with self._lock:
                orders, self._orders = self._orders, []
            for order in orders:
                order()
            now = time.monotonic()
            if now >= next_status and not self.silent:
                next_status = now + 0.2
                self._status()
            if self._caught_up() and self.auto and self._running:
                self._step()
                endless = any(running.script.endless for running in self._running.values())
                if pause := self._step_s or (_ENDLESS_STEP_S if endless else 0.0):
                    time.sleep(pause)

    def _take(self, message: Message) -> None:
        if isinstance(message, Generate):
            # Chosen first: who sees the request in ``generates`` may set another script.
            script = self.script(message)
            self.generates.append(message)
            self._admit(message, script)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            if not self.ignore_aborts:
                self._abort(message)
        elif isinstance(message, TokenizeText):
            text = message.prompt.text if isinstance(message.prompt, TextPrompt) else str(message.prompt)
            ids = pack_i32([ord(char) % 1000 for char in text])
            self._to(message.gateway, TextReply(request_id=message.request_id, ids=ids))
        elif isinstance(message, DetokenizeIds):
            text = "".join(chr(i) for i in unpack_i32(message.ids).tolist())
            self._to(message.gateway, TextReply(request_id=message.request_id, text=text))
        elif isinstance(message, GatewayLease):
            self.leases.append(message)
            if message.gateway not in self._gateways:
                self._gateways[message.gateway] = self._channels.sender(message.gateway, message.address)
                self._to(message.gateway, self._ready_message)
                self._status()
        elif isinstance(message, Control):
            self.controls.append(message)
            reply = self.control_replies.get(message.action, ControlReply(request_id="", status=200, body={"ok": True}))
            self._to(
                message.gateway, ControlReply(request_id=message.request_id, status=reply.status, body=reply.body)
            )

    def _admit(self, generate: Generate, script: Script) -> None:
        if script.rejected is not None:
            self._to(generate.gateway, Rejected(rid=generate.rid, attempt=generate.attempt, error=script.rejected))
        elif script.refused is not None:
            self._row(generate, TextRow(generate.rid, generate.attempt, 0, b"", 0, "", finish=script.refused))
        elif not script.silent:
            self._running[generate.rid] = _Running(generate, script)

    def _abort(self, message: Abort) -> None:
        running = self._running.pop(message.rid, None)
        generate = running.generate if running is not None else None
        attempt = generate.attempt if generate is not None else 0
        row = TextRow(message.rid, attempt, 0, b"", 0, "", finish=Finish(reason="abort", message=message.reason))
        self._to(message.gateway, TextBatch(detokenizer_generation=0, rows=[row]))

    def _step(self) -> None:
        rows: dict[str, list[TextRow]] = {}
        for rid, running in list(self._running.items()):
            row = self._advance(running)
            rows.setdefault(running.generate.gateway, []).append(row)
            if row.finish is not None:
                del self._running[rid]
        for gateway, batch in rows.items():
            self._to(gateway, TextBatch(detokenizer_generation=0, rows=batch))

    def _advance(self, running: _Running) -> TextRow:
        generate, script = running.generate, running.script
        limit = generate.sampling.max_tokens
        total = len(script.pieces)
        if limit is not None and not script.endless:
            total = min(total, limit)
        start = running.sent
        # A resubmitted request is sent again from the start, what it already has in one row.
        many = max(script.per_step, len(generate.output_ids) // 4 - start)
        end = start + many if script.endless else min(total, start + many)
        pieces = [script.pieces[i % len(script.pieces)] for i in range(start, end)]
        offset = running.offset
        finish = None
        if end >= total and not script.endless:
            finish = script.finish if total == len(script.pieces) else Finish(reason="length")
        logprobs = []
        if (num_top := generate.sampling.logprobs) is not None:
            logprobs = [_logprob(piece, num_top, FIRST_ID + n) for n, piece in enumerate(pieces, start)]
        prompt_logprobs: list[TokenLogprob] = []
        if generate.sampling.prompt_logprobs is not None and not running.begun:
            text = generate.prompt.text if isinstance(generate.prompt, TextPrompt) else "ab"
            first = TokenLogprob(text[0], text[0].encode(), None, token_id=ord(text[0]))
            num_top = generate.sampling.prompt_logprobs
            prompt_logprobs = [first, *(_logprob(char, num_top, ord(char)) for char in text[1:])]
        row = TextRow(
            generate.rid,
            generate.attempt,
            start,
            pack_i32(range(FIRST_ID + start, FIRST_ID + end)),
            offset,
            "".join(pieces),
            accepted=None if running.begun else (script.prompt_tokens, script.cached_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            completion_tokens=end,
            starts=_starts(pieces, offset) if generate.text.starts else b"",
        )
        running.begun = True
        running.sent = end
        running.offset += len(row.text)
        return row

    def _row(self, generate: Generate, row: TextRow) -> None:
        self._to(generate.gateway, TextBatch(detokenizer_generation=0, rows=[row]))

    def _status(self) -> None:
        status = EngineStatus(
            generations=dict(self.generations),
            ready=self.ready,
            draining=self.draining,
            num_running=len(self._running),
            num_waiting=0,
            max_queued=4096,
            context_len=4096,
            max_total_tokens=65536,
            vocab_size=1000,
            metrics=dict(self.metrics),
        )
        for gateway in self._gateways:
            self._to(gateway, status)

    def _to(self, gateway: str, message: Message) -> None:
        sender = self._gateways.get(gateway)
        if sender is not None and (self._backlog or not sender.send(message)):
            self._backlog.append((gateway, message))

    def _caught_up(self) -> bool:
        """Send what met a full channel; whether nothing is left. No step is made before."""
        while self._backlog:
            gateway, message = self._backlog[0]
            if not self._gateways[gateway].send(message):
                return False
            self._backlog.popleft()
        return True


def _starts(pieces: Sequence[str], offset: int) -> bytes:
    """Where each piece begins."""
    ends = list(itertools.accumulate(map(len, pieces), initial=offset))
    return pack_i32(ends[:-1])


def _logprob(piece: str, num_top: int, token_id: int) -> TokenLogprob:
    top = [(piece if k == 0 else f"alt{k}", b"x", -0.5 - k) for k in range(num_top)]
    return TokenLogprob(piece, piece.encode(), -0.5, top, token_id, pack_i32([token_id, *range(1, num_top)][:num_top]))
