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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

GatewayName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._@-]{1,96}\Z")]
"""A gateway's name: it becomes part of a socket's path and a metric's label. ``gateway-0``, ``gateway-1f3a@web1``."""
HEALTH_RID_PREFIX = "health-"
"""Requests whose rid begins with this are the gateways' own health checks: run, but counted nowhere."""

# --------------------------------------------------------------------------- columns


def pack_i32(values: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Encode integers as little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(data: bytes) -> NDArray[np.int32]:
    """Decode :func:`pack_i32`; a read-only int32 array that borrows ``data``."""
    return np.frombuffer(data, dtype="<i4")


def pack_f32(values: Sequence[float] | NDArray[np.floating[Any]]) -> bytes:
    """Encode floats as little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes) -> NDArray[np.float32]:
    """Decode :func:`pack_f32`; a read-only float32 array that borrows ``data``."""
    return np.frombuffer(data, dtype="<f4")


# --------------------------------------------------------------------------- bases


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all wire messages: a tagged map. Fields equal to their default are left out."""


class Record(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the records inside a message: an array, positional."""


# --------------------------------------------------------------------------- request parameters


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine (scheduler and worker) needs to know about how to sample.

    The gateway validates ranges; the tokenizer resolves what depends on the model
    (``max_tokens``, ``stop_token_ids``, ids in ``logit_bias``).
    """

    max_tokens: int | None = None
    """Most tokens to generate. None only before the tokenizer resolved it to what fits."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the filter off."""
    min_p: float = 0.0
    seed: int = 0
    """Always set: the gateway draws one when the client gave none, and keeps it for resubmission.
    0 <= seed < 2**63. The draw for output ``index`` is a function of (seed, index) alone."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, the model's own end-of-sequence ids not included."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """None: no log-probabilities. k >= 0: that of the chosen token and of the k most likely."""
    prompt_logprobs: int | None = None
    """As ``logprobs``, for the prompt's tokens (completions with echo). Disables the prefix cache."""


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer needs to know: how ids become text and where the text stops."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output. Exactly one form per request."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag", "lark"]
    text: str
    """The schema (JSON text), expression, grammar, or a JSON list of choices."""
    lazy_trigger: str = ""
    """Not empty: the grammar binds only from the first occurrence of this text in the output on
    (tool_choice auto)."""


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A plain text prompt (completions)."""

    text: str
    add_special_tokens: bool = True


class IdsPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="ids"):
    """Token ids as they are: int32 bytes."""

    ids: bytes


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="chat", omit_defaults=True):
    """Messages to be rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


Prompt = TextPrompt | IdsPrompt | ChatPrompt


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error a client can act on; becomes OpenAI's error envelope."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


# --------------------------------------------------------------------------- gateway -> tokenizer


class Generate(Message, frozen=True, kw_only=True):
    """Submit (or, with attempt > 0, resubmit) one generation."""

    rid: str
    gateway: GatewayName
    attempt: int = 0
    group: str | None = None
    """Rids of one group have the same prompt (parallel samples) or came in one call."""
    prompt: Prompt
    sampling: SamplingParams
    text: TextParams
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    """time.time() after which the request is aborted."""
    received: float = 0.0
    """time.time() at which the gateway received the request (start of TTFT)."""
    output_ids: bytes = b""
    """On a resubmission: every output id delivered so far, int32."""


class Abort(Message, frozen=True, kw_only=True):
    """End a rid. gateway -> tokenizer -> scheduler, so that it stays behind its Generate.

    Repeated by the gateway until the ending arrives; idempotent.
    """

    rid: str
    gateway: GatewayName
    reason: str = "client disconnected"


class TokenizeText(Message, frozen=True, kw_only=True):
    """/tokenize: answered by ``TextReply`` with ids (int32) and, for chat prompts, the rendered text."""

    request_id: str
    gateway: GatewayName
    prompt: Prompt


class DetokenizeIds(Message, frozen=True, kw_only=True):
    """/detokenize: answered by ``TextReply`` with text."""

    request_id: str
    gateway: GatewayName
    ids: bytes


# --------------------------------------------------------------------------- tokenizer -> gateway


class Rejected(Message, frozen=True, kw_only=True):
    """A request refused without the engine: validation, template or grammar errors."""

    rid: str
    attempt: int
    error: ErrorInfo


class TextReply(Message, frozen=True, kw_only=True):
    """Answer to TokenizeText and DetokenizeIds."""

    request_id: str
    ids: bytes = b""
    text: str = ""
    error: ErrorInfo | None = None


class TokenizerReady(Message, frozen=True, kw_only=True):
    """tokenizer -> every local gateway and the scheduler, when it can serve.

    Also says what the tokenizer knows of the model, so a gateway needs no model files.
    """

    generation: int
    context_len: int
    vocab_size: int
    has_chat_template: bool
    default_sampling: dict[str, float] = {}
    """temperature, top_p, top_k, min_p, repetition_penalty from generation_config.json."""
    tool_parser: str = ""
    """``--tool-call-parser`` where it names one; empty: the gateway finds it from ``chat_template``."""
    reasoning_parser: str = ""
    """``--reasoning-parser``; empty: none."""
    chat_template: str = ""
    """The template's text (the one for tools, where there are several)."""
    reasoning_opens: bool = False
    """The generation prompt ends with an open ``<think>``: outputs begin inside the reasoning."""


# --------------------------------------------------------------------------- tokenizer -> scheduler


class Tokenized(Message, frozen=True, kw_only=True):
    """A validated request, as the scheduler sees it."""

    rid: str
    gateway: str
    attempt: int = 0
    group: str | None = None
    input_ids: bytes
    """int32, never empty."""
    sampling: SamplingParams
    """``max_tokens`` resolved."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end ids; empty when ``ignore_eos``."""
    text: TextParams
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    received: float = 0.0
    output_ids: bytes = b""


# --------------------------------------------------------------------------- scheduler -> worker


class BeginRequest(Record, frozen=True):
    """A request takes a slot in the worker. Everything a slot's state is rebuilt from.

    Sent for a new request, and again after a preemption or a worker restart.
    """

    slot: int
    rid: str
    ids: bytes
    """Every id known so far (prompt, then outputs), int32."""
    prompt_len: int
    """How many of ``ids`` are prompt; the rest were generated (penalties, grammar, seeds)."""
    computed_len: int
    """KV of positions [0, computed_len) is already in ``pages`` (cached prefix)."""
    pages: bytes
    """int32 page ids of the slot's page table so far, position order."""
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


class ForwardBatch(Message, frozen=True, kw_only=True):
    """One step. Steps are executed in the order sent: copies, begins, rows, ends.

    Row r works on slot ``slots[r]``. With ``num_tokens[r] > 0`` it computes the next that many
    ids of the request (a prefill chunk). With ``num_tokens[r] == 0`` it computes every id the
    worker knows and has not computed yet, as far as the page table reaches: for a plain decoding
    row that is the one token sampled in the step before; after forced (jump-forward) tokens it
    is several. A row samples iff, after computing, all known ids are computed.

    A continuing row never names its token or its position: the worker knows what it sampled. So
    the batch for step N+1 can be sent while N runs.
    """

    epoch: int
    step: int
    copies: bytes = b""
    """int32 [C, 2]: (source page, destination page), before anything else of the step."""
    begins: list[BeginRequest] = []
    slots: bytes = b""
    """int32 [R]."""
    num_tokens: bytes = b""
    """int32 [R]."""
    num_new_pages: bytes = b""
    """int32 [R]: how many of ``new_pages`` are appended to row r's page table."""
    new_pages: bytes = b""
    """int32 [sum(num_new_pages)]."""
    ends: bytes = b""
    """int32: slots whose requests are over; executed after the rows. A slot may be begun again by
    a later step only."""


class Reset(Message, frozen=True, kw_only=True):
    """Forget every slot and page; answer ``WorkerReady`` with this epoch.

    Sent when the scheduler starts and after a worker restarted, and repeated until answered.
    """

    epoch: int
    scheduler_generation: int


class WorkerControl(Message, frozen=True, kw_only=True):
    """scheduler -> worker: start_profile, stop_profile."""

    request_id: str
    action: Literal["start_profile", "stop_profile"]
    directory: str = ""


# --------------------------------------------------------------------------- rank 0 -> the other ranks


class RankStep(Message, frozen=True, kw_only=True):
    """worker-0 -> the other workers, with ``--tp-size``: what rank 0 computes now, and the others with it.

    Rank 0 alone has the requests and talks to the scheduler; the others have weights and pages. Columns
    as in the worker's ``PackedBatch``; without ``ids`` there are copies only.
    """

    generation: int
    number: int
    """1, 2, ... in each generation; nothing may be missing."""
    copies: bytes = b""
    """int32 [C, 2]: (source page, destination page)."""
    ids: bytes = b""
    """int32 [T], as all that follow."""
    positions: bytes = b""
    query_start: bytes = b""
    context_lens: bytes = b""
    page_table: bytes = b""
    """[S, P], by rows."""
    logit_rows: bytes = b""
    last: bool = False
    """Nothing is computed, now or later: rank 0 ends."""


# --------------------------------------------------------------------------- worker -> scheduler


class WorkerReady(Message, frozen=True, kw_only=True):
    """The worker can run steps. Sent unasked with epoch 0 when it has started, and for each Reset."""

    epoch: int
    generation: int
    rank: int
    """0: it answers for the whole group."""
    num_pages: int
    page_size: int
    context_len: int
    """Most positions the model (and --context-length) allows."""
    vocab_size: int
    max_slots: int
    model_path: str
    """Name of the path that runs: ``generic-torch``, ``cpu-fast``, ..."""
    batch_invariant: bool
    dtype: str
    device: str
    threads: int
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0


class TopLogprobs(Record, frozen=True):
    """Log-probabilities of the k most likely tokens at one position."""

    ids: bytes
    """int32 [k], most likely first."""
    logprobs: bytes
    """float32 [k]."""


class RowFailure(Record, frozen=True):
    """One row could not be computed; its request alone fails with 500."""

    row: int
    message: str


class PromptLogprobs(Record, frozen=True):
    """Prompt log-probabilities of one prefill chunk.

    Covers prompt positions ``[start, start + n)``, start >= 1: position 0 has no distribution.
    """

    row: int
    start: int
    logprobs: bytes
    """float32 [n]."""
    top: list[TopLogprobs] = []


class RowFlag:
    """Bits of ``StepResult.flags``."""

    GRAMMAR_END = 1
    """The grammar is complete: the request finishes with ``stop``."""
    IN_TOOL_CALL = 2
    """Preempt only when no other row can go."""
    SKIPPED = 4
    """The worker had already seen this request's end (an end id, grammar end): nothing was run."""


class StepResult(Message, frozen=True, kw_only=True):
    """What one ForwardBatch gave. Columns have the batch's rows in the batch's order."""

    epoch: int
    step: int
    num_ids: bytes = b""
    """int32 [R]: new ids of each row; 0 where the row did not sample."""
    ids: bytes = b""
    """int32 [sum(num_ids)]: the sampled id, then ids the grammar forced after it."""
    flags: bytes = b""
    """uint8 [R], see RowFlag."""
    logprobs: bytes = b""
    """float32 [n], n = number of ids of the rows that asked for logprobs, in row order. Of the
    distribution before temperature and filters."""
    top_logprobs: list[TopLogprobs] = []
    """One for each entry of ``logprobs`` whose row asked for k > 0."""
    prompt_logprobs: list[PromptLogprobs] = []
    failures: list[RowFailure] = []
    started: float = 0.0
    """time.time() at which the worker began the step."""
    forward_s: float = 0.0
    sample_s: float = 0.0
    idle_s: float = 0.0
    """How long the worker had nothing to do before the step."""


class WorkerControlReply(Message, frozen=True, kw_only=True):
    """Answer to WorkerControl."""

    request_id: str
    ok: bool
    message: str = ""
    status: int = 500
    """HTTP status of a refusal; of no meaning with ``ok``."""


# --------------------------------------------------------------------------- scheduler -> detokenizer


class Finish(Record, frozen=True):
    """How a request ends."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    """The stop id or stop string that ended it."""
    error: ErrorInfo | None = None
    """With reason ``error``: what the client is told. Before acceptance it becomes the HTTP status."""
    message: str = ""
    """Words for the log and for clients that show them (why it was cut short)."""


class BeginOutput(Record, frozen=True):
    """The detokenizer starts (or, with a higher attempt, restarts) a request's text from index 0."""

    rid: str
    attempt: int
    gateway: str
    prompt_len: int
    cached_len: int
    text: TextParams
    logprobs: int | None = None
    prompt_ids: bytes = b""
    """Only with prompt logprobs (the pieces' text is needed for echo)."""


class TokenRow(Record, frozen=True):
    """New output ids of one request."""

    rid: str
    attempt: int
    index: int
    """Absolute output index of the first id."""
    ids: bytes
    """int32."""
    logprobs: bytes = b""
    """float32, one per id, where asked for."""
    top_logprobs: list[TopLogprobs] = []
    prompt_logprobs: bytes = b""
    """float32 [prompt_len - 1], once, with the first row of a request that asked."""
    prompt_top_logprobs: list[TopLogprobs] = []
    finish: Finish | None = None


class TokenBatch(Message, frozen=True, kw_only=True):
    """Everything new for the detokenizer after one scheduler step.

    Order within a message: begins, then rows. A refusal is a TokenRow with a finish and no
    BeginOutput before it (gateway named by ``refused``).
    """

    scheduler_generation: int
    step: int
    begins: list[BeginOutput] = []
    rows: list[TokenRow] = []
    refused: list[RefusedRow] = []
    gone_gateways: list[str] = []
    """Gateways whose lease ran out: drop their requests without an ending."""


class RefusedRow(Record, frozen=True):
    """A request that was never accepted (queue full, can never fit, duplicate rid, unknown to abort)."""

    rid: str
    attempt: int
    gateway: str
    finish: Finish


# --------------------------------------------------------------------------- detokenizer -> gateway


class TokenLogprob(Record, frozen=True):
    """One token of the output with its log-probability, ready for the protocol."""

    token: str
    data: bytes
    """The token's own bytes (it may be part of a character)."""
    logprob: float | None
    """None: the prompt's first token, which no distribution came before."""
    top: list[tuple[str, bytes, float]] = []
    """The most likely tokens there: (token, its bytes, log-probability)."""
    token_id: int = -1
    top_ids: bytes = b""
    """int32, one per entry of ``top``."""


class TextRow(Record, frozen=True):
    """What is new of one request for its gateway."""

    rid: str
    attempt: int
    index: int
    """Absolute output index of the first id of ``ids``."""
    ids: bytes
    """int32: ids whose text is complete within what was sent up to and including this row."""
    text_offset: int
    """Characters (code points) of output text before ``text``."""
    text: str
    accepted: tuple[int, int] | None = None
    """(prompt tokens, cached tokens): the request is running; headers may go out."""
    logprobs: list[TokenLogprob] = []
    """One per id, where asked for."""
    prompt_logprobs: list[TokenLogprob] = []
    """One per prompt token, once, where asked for; the first has no log-probability."""
    finish: Finish | None = None
    completion_tokens: int = 0
    """Output tokens up to and including this row; with ``finish`` the exact usage."""


class TextBatch(Message, frozen=True, kw_only=True):
    """One message per scheduler step and gateway."""

    detokenizer_generation: int
    rows: list[TextRow]


# --------------------------------------------------------------------------- detokenizer -> scheduler


class StopHit(Message, frozen=True, kw_only=True):
    """A stop string was complete with output token ``index``; nothing beyond it counts."""

    rid: str
    attempt: int
    index: int
    stop: str


class GatewayStuck(Message, frozen=True, kw_only=True):
    """A gateway's channel has been full for too long; treat it as gone."""

    gateway: str


# --------------------------------------------------------------------------- scheduler <-> gateways


class EngineStatus(Message, frozen=True, kw_only=True):
    """scheduler -> all gateways, a few times a second and on every change of generation."""

    generations: dict[str, int]
    """role -> generation, e.g. {"tokenizer-0": 0, "scheduler-0": 1, "detokenizer-0": 0, "worker-0": 0}.
    When the tokenizer's, scheduler's or detokenizer's changes, gateways resubmit what is open."""
    ready: bool
    """A worker is ready and requests are scheduled."""
    draining: bool
    num_running: int
    num_waiting: int
    max_queued: int
    context_len: int
    """0 while no worker has been ready yet."""
    max_total_tokens: int
    """Tokens the KV pool holds."""
    vocab_size: int = 0
    batch_invariant: bool = False
    metrics: dict[str, float] = {}
    """Snapshot of the engine's counters and gauges, Prometheus names without prefix."""
    histograms: dict[str, list[float]] = {}
    """name -> [sum, count, bucket counts...]; buckets are named in gateway/metrics.py."""
    run: str = ""
    """Names this run of the whole engine: another one knows nothing of what is open."""


class GatewayLease(Message, frozen=True, kw_only=True):
    """gateway -> scheduler, every second: the gateway is alive. Its address lets others answer it."""

    gateway: GatewayName
    address: str
    """Endpoint the gateway's PULL socket is bound to; ``tcp://host:port#key`` for one on another host."""
    generation: int
    closing: bool = False


class Control(Message, frozen=True, kw_only=True):
    """gateway -> scheduler: an operation on the engine, answered by ControlReply."""

    request_id: str
    gateway: GatewayName
    action: Literal["flush_cache", "abort_all", "abort", "info", "config", "start_profile", "stop_profile", "drain"]
    rid: str = ""
    timeout_s: float = 0.0
    """flush_cache: how long to wait for idleness; 0 answers 409 at once when busy."""
    directory: str = ""


class ControlReply(Message, frozen=True, kw_only=True):
    """Answer to Control."""

    request_id: str
    status: int
    body: dict[str, Any] = {}
    """JSON-able."""


class GatewayAddress(Message, frozen=True, kw_only=True):
    """scheduler -> tokenizer and detokenizer: where a gateway (perhaps on another host) listens."""

    gateway: GatewayName
    address: str
    gone: bool = False


# --------------------------------------------------------------------------- supervisor


class Fleet(Message, frozen=True, kw_only=True):
    """supervisor -> scheduler: the generation of every role, whenever one changes."""

    generations: dict[str, int]
    draining: bool = False
    num_bad_frames: int = 0
    """Dropped so far by every process but the gateways, which count their own."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """all -> supervisor, about once a second."""

    role: str
    index: int
    generation: int
    pid: int
    ready: bool
    progress: int
    """Grows with the work done (loop turns, steps, messages). A process that is busy and does not
    grow is hung."""
    busy_since: float = 0.0
    """time.time() at which the work in hand began; 0 when idle."""
    detail: str = ""
    info: dict[str, Any] = {}
    """With ready: what the start-up table shows."""
    num_bad_frames: int = 0
    """Frames and connections that its inboxes refused."""


# --------------------------------------------------------------------------- unions per channel

ToTokenizer = Generate | Abort | TokenizeText | DetokenizeIds | GatewayAddress
ToScheduler = (
    Tokenized | Abort | StopHit | GatewayStuck | GatewayLease | Control | Fleet | TokenizerReady
    | WorkerReady | StepResult | WorkerControlReply
)
ToRemoteTokenizer = Generate | Abort | TokenizeText | DetokenizeIds
ToRemoteScheduler = GatewayLease | Control
ToWorker = ForwardBatch | Reset | WorkerControl
ToRank = RankStep
ToDetokenizer = TokenBatch | GatewayAddress
ToGateway = Rejected | TextReply | TokenizerReady | TextBatch | EngineStatus | ControlReply
ToSupervisor = Heartbeat
