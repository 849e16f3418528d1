"""Every message that crosses a process boundary, and how it looks on the wire.

One frozen, tagged ``msgspec.Struct`` per message, encoded as MessagePack. A message is a map
with its tag under ``"type"``; the small records inside one (marked ``array_like``) are arrays,
because a step carries hundreds of them. Token ids, page ids and the other columns of a step
travel as little-endian int32 (or float32, uint8) bytes: see :func:`pack_i32`. There is no pickle
and there are no tensors, so a process written in another language could join; the golden-byte
tests decode each message with the plain ``msgpack`` package to prove it.

Vocabulary
    rid       one generation, chosen by the gateway, unique in the engine while it lives.
              A client's request with ``n`` choices or several prompts is several rids that share
              a ``group``.
    attempt   0 for a first submission, +1 each time the gateway resubmits after a process of the
              engine died. Whoever sees a lower attempt than it knows drops the message.
    generation  how many times the supervisor has started this role (0 is the first). Names the
              incarnation a message belongs to, so that what a dead process left in a pipe is
              recognised and dropped.
    epoch     one run of the worker's state under one scheduler: changes with every ``Reset``.
    index     absolute position of an output token: 0 is the first generated token of the request,
              whatever attempt generated it.

One file per part of the way; everything is imported from here.

``columns.py``    columns of a step: arrays of numbers as little-endian bytes
``base.py``       what all messages have in common
``request.py``    what a request asks for, and why one is refused
``tokenizer.py``  gateway, tokenizer and scheduler: a request on its way in
``worker.py``     scheduler and worker: a step and its result
``output.py``     scheduler, detokenizer and gateway: tokens and text on their way out
``fleet.py``      scheduler, gateways and supervisor: who is there, and how they are
"""

from __future__ import annotations

from common.messages.base import (
    HEALTH_RID_PREFIX,
    GatewayName,
    Message,
    Record,
)
from common.messages.columns import (
    pack_f32,
    pack_i32,
    pack_ints,
    unpack_f32,
    unpack_i32,
    unpack_ints,
)
from common.messages.fleet import (
    Control,
    ControlReply,
    EngineStatus,
    Fleet,
    GatewayAddress,
    GatewayLease,
    Heartbeat,
)
from common.messages.output import (
    BeginOutput,
    Finish,
    GatewayStuck,
    RefusedRow,
    StopHit,
    TextBatch,
    TextRow,
    TokenBatch,
    TokenLogprob,
    TokenRow,
)
from common.messages.request import (
    ChatPrompt,
    ErrorInfo,
    Grammar,
    IdsPrompt,
    Prompt,
    SamplingParams,
    TextParams,
    TextPrompt,
)
from common.messages.tokenizer import (
    Abort,
    DetokenizeIds,
    Generate,
    Rejected,
    TextReply,
    Tokenized,
    TokenizerReady,
    TokenizeText,
)
from common.messages.worker import (
    BeginRequest,
    ForwardBatch,
    PromptLogprobs,
    RankStep,
    Reset,
    RowFailure,
    RowFlag,
    StepResult,
    TopLogprobs,
    WorkerControl,
    WorkerControlReply,
    WorkerReady,
)

# --------------------------------------------------------------------------- unions per channel

ToTokenizer = Generate | Abort | TokenizeText | DetokenizeIds | GatewayAddress
ToScheduler = (
    Tokenized
    | Abort
    | StopHit
    | GatewayStuck
    | GatewayLease
    | Control
    | Fleet
    | TokenizerReady
    | WorkerReady
    | StepResult
    | WorkerControlReply
)
ToRemoteTokenizer = Generate | Abort | TokenizeText | DetokenizeIds
ToRemoteScheduler = GatewayLease | Control
ToWorker = ForwardBatch | Reset | WorkerControl
ToRank = RankStep
ToDetokenizer = TokenBatch | GatewayAddress
ToGateway = Rejected | TextReply | TokenizerReady | TextBatch | EngineStatus | ControlReply
ToSupervisor = Heartbeat

__all__ = [
    "HEALTH_RID_PREFIX",
    "Abort",
    "BeginOutput",
    "BeginRequest",
    "ChatPrompt",
    "Control",
    "ControlReply",
    "DetokenizeIds",
    "EngineStatus",
    "ErrorInfo",
    "Finish",
    "Fleet",
    "ForwardBatch",
    "GatewayAddress",
    "GatewayLease",
    "GatewayName",
    "GatewayStuck",
    "Generate",
    "Grammar",
    "Heartbeat",
    "IdsPrompt",
    "Message",
    "Prompt",
    "PromptLogprobs",
    "RankStep",
    "Record",
    "RefusedRow",
    "Rejected",
    "Reset",
    "RowFailure",
    "RowFlag",
    "SamplingParams",
    "StepResult",
    "StopHit",
    "TextBatch",
    "TextParams",
    "TextPrompt",
    "TextReply",
    "TextRow",
    "ToDetokenizer",
    "ToGateway",
    "ToRank",
    "ToRemoteScheduler",
    "ToRemoteTokenizer",
    "ToScheduler",
    "ToSupervisor",
    "ToTokenizer",
    "ToWorker",
    "TokenBatch",
    "TokenLogprob",
    "TokenRow",
    "TokenizeText",
    "Tokenized",
    "TokenizerReady",
    "TopLogprobs",
    "WorkerControl",
    "WorkerControlReply",
    "WorkerReady",
    "pack_f32",
    "pack_i32",
    "pack_ints",
    "unpack_f32",
    "unpack_i32",
    "unpack_ints",
]
