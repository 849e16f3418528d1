"""Scheduler and worker: a step and its result."""

from __future__ import annotations

from typing import Literal

from common.messages.base import Message, Record
from common.messages.request import Grammar, SamplingParams

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
    """int32 [T], as all that follow. -1: rank 0 has not seen it yet, its device broadcasts it to the others'."""
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
    max_drafts: int = 0
    """Most ids that a decoding row may compute beyond those known; 0: it speculates on none."""
    tile_tokens: int = 1
    """Matrix products come in tiles of so many tokens: a step that fills them costs least for each. 1: not known."""


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
    """int32 [sum(num_ids)]: the sampled id, then ids the grammar forced after it, or those drawn after drafts."""
    flags: bytes = b""
    """uint8 [R], see RowFlag."""
    logprobs: bytes = b""
    """float32 [n], n = number of ids of the rows that asked for logprobs, in row order. Of the
    distribution before temperature and filters."""
    top_logprobs: list[TopLogprobs] = []
    """One for each entry of ``logprobs`` whose row asked for k > 0."""
    prompt_logprobs: list[PromptLogprobs] = []
    failures: list[RowFailure] = []
    num_drafts: bytes = b""
    """int32 [R]: ids that each row computed beyond those known, in the hope that they would be drawn; empty: none did.
    Of a row with drafts all but the last of its new ids were drafts."""
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
