"""The tokenizer process: from the gateways' requests to token ids for the scheduler."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

from common.channels import Receiver
from common.config import ServerConfig
from common.errors import RequestError
from common.inboxes import inbox_address, is_remote, remote_address
from common.messages import ChatPrompt, TokenizerReady, ToTokenizer
from common.process import ProcessContext
from common.trace_channels import describe_tokenized, traced
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encoder import TextEncoder
from tokenizer_proc.model_info import load_model_info, tokenizer_folder
from tokenizer_proc.outbox import Outbox
from tokenizer_proc.prepare import Preparer
from tokenizer_proc.server import TokenizerServer

_READY_REPEAT_S = 2.0
"""TokenizerReady is repeated, so that a restarted gateway or scheduler hears of it."""
_BUSY_WAIT_S = 0.005
"""While a channel is full, or helpers' time is watched."""
_BLOCKED_WAIT_S = 0.002
_BATCH = 64
"""Messages taken in between two looks at the outbox."""


def main(context: ProcessContext) -> None:
    """Run until asked to stop. Raises ``ConfigError`` when the model's files cannot be used."""
    preparer, ready = load(context.config, context.generation)
    inboxes = open_inboxes(context)
    outbox = Outbox(
        traced(context.channels.sender("scheduler"), context.trace, describe_tokenized),
        lambda gateway, address: context.channels.sender(_inbox(gateway), address),
        lambda gateway: "" if is_remote(gateway) else inbox_address(context.run_dir, _inbox(gateway)),
    )
    for index in range(context.config.http.gateways):
        outbox.open_gateway(f"gateway-{index}")
    wake = _Wakeup()
    texts, grammars = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
    texts.submit(preparer.warm_up)
    server = TokenizerServer(preparer, outbox, ready, texts, grammars, wake.set)
    try:
        _loop(context, server, outbox, inboxes, ready, wake)
    finally:
        texts.shutdown(wait=False, cancel_futures=True)
        grammars.shutdown(wait=False, cancel_futures=True)
        wake.close()


def open_inboxes(context: ProcessContext) -> list[Receiver[ToTokenizer]]:
    """The inbox, and with ``--engine-listen`` the one for gateways on other hosts."""
    inboxes = [context.channels.receiver(context.name)]
    if engine_listen := context.config.hosts.engine_listen:
        address = remote_address(engine_listen, context.name)
        inboxes.append(
            context.channels.receiver(f"remote-{context.name}", address, lambda message: is_remote(message.gateway))
        )
    return inboxes


def load(config: ServerConfig, generation: int) -> tuple[Preparer, TokenizerReady]:
    """Read the model's files; what to tell the others about them."""
    info = load_model_info(config)
    template = ChatTemplate(info.templates, info.special_tokens, info.template_source)
    encoder = TextEncoder.from_folder(tokenizer_folder(config), info.special_tokens.get("bos_token"))
    ready = TokenizerReady(
        generation=generation,
        context_len=info.context_len,
        vocab_size=info.vocab_size,
        has_chat_template=template.available,
        default_sampling=info.default_sampling,
        tool_parser="" if config.model.tool_call_parser == "auto" else config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        chat_template=info.templates.get("tool_use", info.templates.get("default", "")),
        reasoning_opens=_opens_reasoning(template, encoder),
    )
    return Preparer(info, encoder, template), ready


def _opens_reasoning(template: ChatTemplate, encoder: TextEncoder) -> bool:
    """The template ends the prompt inside a reasoning block, so outputs begin within it."""
    probe = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    try:
        rendered, _ = template.render(probe, encoder.control)
    except RequestError:  # a template with demands of its own; its requests will hear of them
        return False
    return rendered.rstrip().endswith(("<think>", "<|START_THINKING|>"))


def _inbox(gateway: str) -> str:
    return gateway if gateway.startswith("gateway-") else f"gateway-{gateway}"


def _loop(
    context: ProcessContext,
    server: TokenizerServer,
    outbox: Outbox,
    inboxes: list[Receiver[ToTokenizer]],
    ready: TokenizerReady,
    wake: _Wakeup,
) -> None:
    poller = zmq.Poller()
    for inbox in inboxes:
        poller.register(inbox.socket, zmq.POLLIN)
    poller.register(wake.fd, zmq.POLLIN)
    context.on_stop(wake.set)
    last_ready = 0.0
    while not context.stopping:
        now = time.monotonic()
        if now - last_ready >= _READY_REPEAT_S:
            outbox.offer_all(ready)
            last_ready = now
        context.beat(ready=True, progress=server.num_handled)
        outbox.flush(now)
        server.collect()
        if outbox.blocked:
            time.sleep(_BLOCKED_WAIT_S)  # the inbox is left alone: the gateways' sends fill up behind it
            continue
        messages = [message for inbox in inboxes for message in inbox.receive(_BATCH)]
        for message in messages:
            server.handle(message)
        if not messages:
            rest_s = context.beat_in_s if outbox.idle and not server.num_jobs else _BUSY_WAIT_S
            poller.poll(int(1000 * rest_s))
            wake.clear()


class _Wakeup:
    """Ends the loop's wait from a helper thread or a signal handler."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def set(self) -> None:
        """Safe in threads and signal handlers; a full pipe is awake enough."""
        try:
            os.write(self._write, b"x")
        except OSError:
            pass

    def clear(self) -> None:
        """Forget the calls so far."""
        try:
            os.read(self.fd, 65536)
        except OSError:
            pass

    def close(self) -> None:
        """Close both ends."""
        fd, self.fd = self.fd, -1
        os.close(fd)
        write, self._write = self._write, -1
        os.close(write)
