"""The detokenizer process: from the scheduler's ids to text for the gateways."""

from __future__ import annotations

import time
from pathlib import Path

from tokenizers import Tokenizer

from common.channels import Receiver
from common.config import ServerConfig
from common.errors import ConfigError
from common.inboxes import inbox_address
from common.messages import ToDetokenizer
from common.process import ProcessContext, calm_gc
from common.trace_channels import describe_text, traced
from detokenizer_proc.decoding import Vocabulary
from detokenizer_proc.outbox import Outbox
from detokenizer_proc.server import Detokenizer

_FULL_WAIT_S = 0.005
_BATCH = 16
"""Messages taken in before the gateways are sent what came of them."""


def load_tokenizer(config: ServerConfig) -> Tokenizer:
    """The tokenizer.json of ``--tokenizer``, else of the model's folder.

    Raises:
        ConfigError: it is missing or cannot be used.
    """
    path = Path(config.model.tokenizer or config.model_dir) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no {path}: name a folder that has a tokenizer.json with --tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise ConfigError(f"{path} cannot be loaded: {error}") from None


def main(context: ProcessContext) -> None:
    """Run until asked to stop. Raises ``ConfigError`` when the tokenizer cannot be used."""
    vocabulary = Vocabulary(load_tokenizer(context.config))
    inbox: Receiver[ToDetokenizer] = context.channels.receiver("detokenizer")
    outbox = Outbox(
        lambda gateway, address: traced(
            context.channels.sender(_inbox(gateway), address), context.trace, describe_text
        ),
        lambda gateway: inbox_address(context.run_dir, _inbox(gateway)),
        context.generation,
    )
    detokenizer = Detokenizer(vocabulary, outbox, context.channels.sender("scheduler"))
    calm_gc()
    while not context.stopping:
        context.beat(ready=True, progress=detokenizer.num_handled)
        for message in inbox.receive(_BATCH):
            detokenizer.handle(message)
        detokenizer.flush(time.monotonic())
        inbox.wait(_FULL_WAIT_S if detokenizer.waiting else context.beat_in_s)
    detokenizer.flush(time.monotonic())


def _inbox(gateway: str) -> str:
    return gateway if gateway.startswith("gateway-") else f"gateway-{gateway}"
