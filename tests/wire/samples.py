"""One instance of every message, every field set to something that is not its default."""

from __future__ import annotations

from typing import Any

from common import messages as m

ERROR = m.ErrorInfo(status=500, message="no", code="c", param="p", retry_after_s=1.5)
FINISH = m.Finish("stop", "END", ERROR, "words")
TOP = m.TopLogprobs(m.pack_i32([5, 6]), m.pack_f32([-0.5, -1.0]))
SAMPLING = m.SamplingParams(
    max_tokens=9, min_tokens=1, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=2**62, ignore_eos=True,
    stop_token_ids=(1, 2), presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={7: -1.0},
    logprobs=2, prompt_logprobs=0,
)  # fmt: skip
TEXT = m.TextParams(stop=("é", "b"), include_stop_str_in_output=True, skip_special_tokens=False, starts=True)
GRAMMAR = m.Grammar(kind="regex", text="a+", lazy_trigger="<t>")
CHAT = m.ChatPrompt(
    messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function"}], add_generation_prompt=False,
    continue_final_message=True, template_kwargs={"k": None},
)  # fmt: skip
FIRST = m.TokenLogprob("a", b"a", None, [], 4)
TOKEN = m.TokenLogprob("é", b"\xc3\xa9", -0.5, [("a", b"a", -1.5)], 5, m.pack_i32([6]))

SAMPLES: list[Any] = [
    m.Generate(
        rid="r1", gateway="gateway-0", attempt=1, group="g", prompt=CHAT, sampling=SAMPLING, text=TEXT, grammar=GRAMMAR,
        priority=-1, cache_salt="s", deadline=2.5, received=1.5, output_ids=m.pack_i32([1, 2]),
    ),
    m.Abort(rid="r1", gateway="gateway-0", reason="left"),
    m.TokenizeText(request_id="q", gateway="gateway-0", prompt=m.TextPrompt(text="hi", add_special_tokens=False)),
    m.DetokenizeIds(request_id="q", gateway="gateway-0", ids=m.pack_i32([1, -1])),
    m.Rejected(rid="r1", attempt=0, error=ERROR),
    m.TextReply(request_id="q", ids=m.pack_i32([3]), text="t", error=ERROR),
    m.TokenizerReady(
        generation=1, context_len=64, vocab_size=100, has_chat_template=True, default_sampling={"top_p": 0.5},
        tool_parser="hermes", reasoning_parser="qwen3", chat_template="{{ x }}", reasoning_opens=True,
    ),
    m.Tokenized(
        rid="r1", gateway="gateway-0", attempt=1, group="g", input_ids=m.pack_i32([1]), sampling=SAMPLING,
        eos_token_ids=(0,), text=TEXT, grammar=GRAMMAR, priority=1, cache_salt="s", deadline=2.5, received=1.5,
        output_ids=m.pack_i32([4]),
    ),
    m.ForwardBatch(
        epoch=1, step=2, copies=m.pack_i32([1, 2]),
        begins=[
            m.BeginRequest(0, "r1", m.pack_i32([1]), 1, 0, m.pack_i32([9]), SAMPLING, (0,), GRAMMAR),
        ],
        slots=m.pack_i32([0]), num_tokens=m.pack_i32([1]), num_new_pages=m.pack_i32([1]), new_pages=m.pack_i32([9]),
        ends=m.pack_i32([3]),
    ),
    m.Reset(epoch=3, scheduler_generation=1),
    m.WorkerControl(request_id="q", action="start_profile", directory="/d"),
    m.RankStep(
        generation=1, number=2, copies=m.pack_i32([1, 2]), ids=m.pack_i32([5]), positions=m.pack_i32([3]),
        query_start=m.pack_i32([0, 1]), context_lens=m.pack_i32([4]), page_table=m.pack_i32([9]),
        logit_rows=m.pack_i32([0]), last=True,
    ),
    m.WorkerReady(
        epoch=1, generation=0, rank=0, num_pages=10, page_size=16, context_len=64, vocab_size=100, max_slots=8,
        model_path="generic-torch", batch_invariant=True, dtype="float32", device="cpu", threads=1,
        kv_bytes_per_token=4, weight_bytes=5, max_drafts=8, tile_tokens=12,
    ),
    m.StepResult(
        epoch=1, step=2, num_ids=m.pack_i32([1]), ids=m.pack_i32([5]), flags=b"\x01", logprobs=m.pack_f32([-0.5]),
        top_logprobs=[TOP], prompt_logprobs=[m.PromptLogprobs(0, 1, m.pack_f32([-1.0]), [TOP])],
        failures=[m.RowFailure(0, "bad")], num_drafts=m.pack_i32([3]), started=1.5, forward_s=0.5, sample_s=0.25,
        idle_s=0.125,
    ),
    m.WorkerControlReply(request_id="q", ok=False, message="running", status=409),
    m.TokenBatch(
        scheduler_generation=1, step=2,
        begins=[m.BeginOutput("r1", 0, "gateway-0", 3, 2, TEXT, 1, m.pack_i32([1]))],
        rows=[
            m.TokenRow("r1", 0, 1, m.pack_i32([5]), m.pack_f32([-0.5]), [TOP], m.pack_f32([-1.0]), [TOP], FINISH),
        ],
        refused=[m.RefusedRow("r2", 0, "gateway-0", m.Finish("abort"))], gone_gateways=["gateway-1"],
    ),
    m.TextBatch(
        detokenizer_generation=1,
        rows=[
            m.TextRow("r1", 0, 1, m.pack_i32([5]), 3, "é", (3, 2), [TOKEN], [FIRST, TOKEN], FINISH, 2, m.pack_i32([3]))
        ],
    ),
    m.StopHit(rid="r1", attempt=0, index=4, stop="END"),
    m.GatewayStuck(gateway="gateway-0"),
    m.EngineStatus(
        generations={"worker-0": 1}, ready=True, draining=True, num_running=1, num_waiting=2, max_queued=3,
        context_len=4, max_total_tokens=5, vocab_size=6, batch_invariant=True, metrics={"m": 0.5},
        histograms={"h": [1.0, 2.0]}, run="u",
    ),
    m.GatewayLease(gateway="gateway-0", address="ipc:///x", generation=0, closing=True),
    m.Control(request_id="q", gateway="gateway-0", action="abort", rid="r1", timeout_s=0.5, directory="/d"),
    m.ControlReply(request_id="q", status=200, body={"ok": [1, None]}),
    m.GatewayAddress(gateway="gateway-0", address="ipc:///x", gone=True),
    m.Fleet(generations={"worker-0": 1}, draining=True, num_bad_frames=1),
    m.Heartbeat(
        role="worker", index=0, generation=1, pid=2, ready=True, progress=3, busy_since=0.5, detail="d", info={"a": 1},
        num_bad_frames=4,
    ),
]  # fmt: skip
