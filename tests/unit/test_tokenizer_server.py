"""The tokenizer's loop: order per request, nobody waits for another's grammar, nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tokenizers import Tokenizer

from common.inboxes import GATEWAY_STUCK_S
from common.messages import (
    Abort,
    DetokenizeIds,
    GatewayAddress,
    Generate,
    Grammar,
    Message,
    Rejected,
    SamplingParams,
    TextParams,
    TextPrompt,
    TextReply,
    Tokenized,
    TokenizerReady,
    pack_i32,
)
from tests.unit.text_fakes import Channels, FakeSender
from tests.unit.text_tokenizers import byte_level_json
from tokenizer_proc import server as server_module
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encoder import TextEncoder
from tokenizer_proc.grammar_check import GRAMMAR_TIMEOUT_S
from tokenizer_proc.model_info import ModelInfo
from tokenizer_proc.outbox import Outbox
from tokenizer_proc.prepare import Preparer
from tokenizer_proc.server import TokenizerServer

READY = TokenizerReady(generation=0, context_len=64, vocab_size=420, has_chat_template=False)
NUMBERS = Grammar(kind="regex", text="[0-9]+")


class Later(Executor):
    """Runs what was submitted when told to."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


class Bench:
    """A tokenizer with fake channels and threads that run by hand."""

    def __init__(self) -> None:
        info = ModelInfo(context_len=64, vocab_size=420, eos_token_ids=(2,))
        preparer = Preparer(info, TextEncoder(Tokenizer.from_str(byte_level_json())), ChatTemplate({}, {}), lambda: 0.0)
        self.scheduler = FakeSender()
        self.channels = Channels()
        self.outbox = Outbox(self.scheduler, self.channels.connect, self.channels.local)
        self.texts, self.grammars = Later(), Later()
        self.now = 1.0
        self.wakes = 0
        self.server = TokenizerServer(
            preparer, self.outbox, READY, self.texts, self.grammars, self._wake, lambda: self.now
        )

    def _wake(self) -> None:
        self.wakes += 1

    def generate(self, rid: str, text: str = "hi", gateway: str = "gateway-0", **fields: Any) -> None:
        self.server.handle(
            Generate(
                rid=rid, gateway=gateway, prompt=TextPrompt(text=text), sampling=SamplingParams(), text=TextParams(),
                **fields,
            )
        )  # fmt: skip

    def finish_jobs(self) -> None:
        self.texts.run()
        self.grammars.run()
        self.server.collect()

    def replies(self, gateway: str = "gateway-0") -> list[Message]:
        sent = self.channels.opened[gateway].sent
        return [message for message in sent if not isinstance(message, TokenizerReady)]

    def to_scheduler(self) -> list[tuple[str, str]]:
        return [(type(m).__name__, m.rid) for m in self.scheduler.sent if isinstance(m, Tokenized | Abort)]


def test_a_good_request_goes_to_the_scheduler_and_a_bad_one_back() -> None:
    bench = Bench()
    bench.generate("good")
    bench.generate("bad", "", attempt=3)
    assert bench.to_scheduler() == [("Tokenized", "good")]
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected)
    assert (reply.rid, reply.attempt, reply.error.status) == ("bad", 3, 400)


def test_others_do_not_wait_for_a_grammar() -> None:
    bench = Bench()
    bench.generate("slow", grammar=NUMBERS)
    bench.generate("quick")
    assert bench.to_scheduler() == [("Tokenized", "quick")]
    bench.finish_jobs()
    assert bench.wakes == 1
    assert bench.to_scheduler() == [("Tokenized", "quick"), ("Tokenized", "slow")]


def test_a_bad_grammar_is_rejected_and_harms_nobody() -> None:
    bench = Bench()
    bench.generate("bad", grammar=Grammar(kind="regex", text="(a"))
    bench.generate("good", grammar=NUMBERS)
    bench.finish_jobs()
    assert bench.to_scheduler() == [("Tokenized", "good")]
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected) and reply.error.code == "invalid_grammar"


def test_an_abort_overtakes_nothing_of_its_request() -> None:
    bench = Bench()
    bench.generate("r")
    bench.server.handle(Abort(rid="r", gateway="gateway-0"))
    assert bench.to_scheduler() == [("Tokenized", "r"), ("Abort", "r")]


def test_an_abort_takes_out_a_request_that_is_being_prepared() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    bench.server.handle(Abort(rid="r", gateway="gateway-0"))
    bench.finish_jobs()
    assert bench.to_scheduler() == [("Abort", "r")]
    assert bench.replies() == [] and bench.server.num_jobs == 0


def test_an_abort_drops_a_result_that_was_not_handed_out_yet() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    bench.grammars.run()
    bench.server.handle(Abort(rid="r", gateway="gateway-0"))
    bench.server.collect()
    assert bench.to_scheduler() == [("Abort", "r")]


def test_a_resubmission_replaces_the_attempt_being_prepared() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    bench.generate("r", grammar=NUMBERS)  # repeated: dropped
    bench.generate("r", grammar=NUMBERS, attempt=1)
    bench.finish_jobs()
    assert [m.attempt for m in bench.scheduler.sent if isinstance(m, Tokenized)] == [1]


def test_another_gateways_request_of_the_same_rid_is_refused() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    bench.generate("r", gateway="gateway-1")
    (reply,) = bench.replies("gateway-1")
    assert isinstance(reply, Rejected) and reply.error.status == 409
    bench.finish_jobs()
    assert bench.to_scheduler() == [("Tokenized", "r")]


def test_a_grammar_that_takes_too_long_is_rejected_and_its_late_result_dropped() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    job = bench.server._jobs["r"]
    job.started = bench.now  # a thread works on it
    bench.now += GRAMMAR_TIMEOUT_S + 0.1
    bench.server.collect()
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected)
    assert (reply.error.status, reply.error.code) == (400, "invalid_grammar")
    bench.finish_jobs()
    assert bench.to_scheduler() == []


def test_too_many_slow_requests_are_refused_with_503() -> None:
    bench = Bench()
    for n in range(server_module.MAX_JOBS + 1):
        bench.generate(f"r{n}", grammar=NUMBERS)
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected)
    assert (reply.error.status, reply.error.retry_after_s) == (503, 1.0)


def test_long_texts_are_encoded_beside_the_loop() -> None:
    bench = Bench()
    bench.generate("long", "word " * 20_000)
    bench.generate("short")
    assert bench.to_scheduler() == [("Tokenized", "short")]
    bench.finish_jobs()
    (reply,) = bench.replies()
    assert isinstance(reply, Rejected) and reply.error.code == "context_length_exceeded"


def test_what_a_full_scheduler_channel_did_not_take_is_kept_in_order() -> None:
    bench = Bench()
    bench.scheduler.room = 1
    for rid in "abc":
        bench.generate(rid)
    assert bench.outbox.blocked
    bench.scheduler.room = None
    bench.generate("d")  # must not overtake the others
    bench.outbox.flush(0.0)
    assert not bench.outbox.blocked
    assert [rid for _, rid in bench.to_scheduler()] == ["a", "b", "c", "d"]


def test_a_full_gateway_keeps_its_replies_and_blocks_nobody() -> None:
    bench = Bench()
    bench.outbox.open_gateway("gateway-0")
    bench.channels.opened["gateway-0"].room = 0
    bench.generate("bad", "")
    bench.generate("good")
    bench.outbox.flush(0.0)
    assert bench.to_scheduler() == [("Tokenized", "good")] and not bench.outbox.blocked
    bench.channels.opened["gateway-0"].room = None
    bench.outbox.flush(1.0)
    assert [m.rid for m in bench.replies() if isinstance(m, Rejected)] == ["bad"]
    assert bench.outbox.idle


def test_replies_to_a_gateway_that_stays_full_are_given_up() -> None:
    bench = Bench()
    bench.outbox.open_gateway("gateway-0")
    bench.channels.opened["gateway-0"].room = 0
    bench.generate("bad", "")
    bench.outbox.flush(0.0)
    bench.outbox.flush(GATEWAY_STUCK_S + 0.1)
    assert bench.outbox.idle


def test_a_new_gateway_is_told_that_the_tokenizer_is_ready() -> None:
    bench = Bench()
    bench.server.handle(GatewayAddress(gateway="gateway-7", address="tcp://10.0.0.7:1"))
    assert bench.channels.addresses == [("gateway-7", "tcp://10.0.0.7:1")]
    bench.generate("r", gateway="gateway-8")
    for gateway in ("gateway-7", "gateway-8"):
        assert bench.channels.opened[gateway].sent == [READY]


def test_news_of_a_gone_gateway_does_not_hurt_its_successors_requests() -> None:
    bench = Bench()
    bench.generate("r", grammar=NUMBERS)
    bench.server.handle(GatewayAddress(gateway="gateway-0", address="", gone=True))
    assert bench.channels.opened["gateway-0"].closed
    bench.server.handle(GatewayAddress(gateway="gateway-0", address="tcp://10.0.0.1:2"))
    bench.finish_jobs()
    assert bench.to_scheduler() == [("Tokenized", "r")]


def test_detokenize_is_answered_with_text_or_an_error() -> None:
    bench = Bench()
    for request_id, ids in (("good", [1]), ("bad", [10_000])):
        bench.server.handle(DetokenizeIds(request_id=request_id, gateway="gateway-0", ids=pack_i32(ids)))
    good, bad = bench.replies()
    assert isinstance(good, TextReply) and isinstance(bad, TextReply)
    assert (good.text, good.error) == ("<|im_start|>", None)
    assert bad.error is not None and bad.error.status == 400
