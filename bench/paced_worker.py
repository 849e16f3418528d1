"""A worker without a model that gives tokens at a fixed rate: what stands behind ``bench.text_path``.

    python -m bench.paced_worker --run-dir DIR --rate 500

It answers the real scheduler. Every row that samples gets the next ids of a given text, so that the detokenizer has
real text to write; a step of R such rows takes R / rate seconds, so the rate is the same however many
requests run. With ``--drafts`` a row gets several ids now and then (``num_drawn``), and the rate is higher by so many.
"""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from common import config as config_file
from common.channels import Channels
from common.messages import ForwardBatch, Reset, StepResult, WorkerReady, pack_i32, unpack_i32

NUM_PAGES, PAGE_SIZE, MAX_SLOTS = 1 << 16, 16, 256
TEXT = Path(__file__).resolve().parents[1] / "docs"
MAX_DRAFTS = 8


def num_drawn(turn: int) -> int:
    """How many ids a row gives in its so many-th step, where drafts are taken: 1.2 in the mean, as short answers of
    a small model do (docs/benchmarks.md, D)."""
    return 3 if turn % 10 == 0 else 1


@dataclass
class _Slot:
    known: int
    computed: int
    next_id: int
    """Index into the text."""
    turn: int
    """Steps in which it sampled; another for each slot, so that rows take turns in giving several ids."""


class PacedWorker:
    """Keeps the contract of ``ForwardBatch`` for requests without grammar and log-probabilities."""

    def __init__(self, ids: list[int], rate: float, context_len: int, vocab_size: int, drafts: bool = False) -> None:
        self._ids = ids
        self._rate = rate
        self._drafts = drafts
        self._context_len = context_len
        self._vocab_size = vocab_size
        self._slots: dict[int, _Slot] = {}
        self._due = 0.0
        self._num_begun = 0

    def ready(self, epoch: int = 0) -> WorkerReady:
        """Sent at the start (epoch 0) and for a Reset."""
        self._slots.clear()
        return WorkerReady(
            epoch=epoch, generation=0, rank=0, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
            context_len=self._context_len, vocab_size=self._vocab_size, max_slots=MAX_SLOTS, model_path="paced",
            batch_invariant=True, dtype="none", device="none", threads=0,
            max_drafts=MAX_DRAFTS if self._drafts else 0,
        )  # fmt: skip

    def step(self, batch: ForwardBatch) -> StepResult:
        """Execute a step, and sleep until it is due."""
        for begin in batch.begins:
            self._num_begun += 1
            at = 997 * self._num_begun % len(self._ids)
            self._slots[begin.slot] = _Slot(len(begin.ids) // 4, begin.computed_len, at, self._num_begun)
        counts: list[int] = []
        ids: list[int] = []
        for slot, chunk in zip(unpack_i32(batch.slots).tolist(), unpack_i32(batch.num_tokens).tolist(), strict=True):
            state = self._slots[slot]
            state.computed += chunk or state.known - state.computed
            samples = state.computed == state.known
            state.turn += samples
            n = num_drawn(state.turn) if samples and self._drafts and not chunk else int(samples)
            counts.append(n)
            ids += [self._ids[(state.next_id + i) % len(self._ids)] for i in range(n)]
            state.next_id += n
            state.known += n
            state.computed += max(n - 1, 0)  # the last one alone was not computed
        for slot in unpack_i32(batch.ends).tolist():
            del self._slots[slot]
        drafts = [max(n - 1, 0) for n in counts]
        started = time.time()
        now = time.monotonic()
        self._due = max(self._due, now - 0.1) + sum(map(bool, counts)) / self._rate  # late by a bit: caught up with
        time.sleep(max(0.0, self._due - now))
        return StepResult(
            epoch=batch.epoch, step=batch.step, num_ids=pack_i32(counts), ids=pack_i32(ids),
            flags=bytes(len(counts)), num_drafts=pack_i32(drafts) if any(drafts) else b"",
            started=started, forward_s=time.monotonic() - now,
        )  # fmt: skip


def text_ids(folder: Path) -> tuple[list[int], int]:
    """Ids of the documentation's text, and the vocabulary's size."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(TEXT.glob("*.md")))
    return tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.get_vocab_size()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="of the scheduler")
    parser.add_argument("--rate", type=float, default=500.0, help="tokens per second of all requests together")
    parser.add_argument("--drafts", action="store_true", help="several ids of a row now and then")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: exit(0))
    config = config_file.load((args.run_dir / "config.json").read_bytes())
    ids, vocab_size = text_ids(Path(config.model_dir))
    channels = Channels(args.run_dir)
    inbox, outbox = channels.receiver("worker-0"), channels.sender("scheduler-work")
    worker = PacedWorker(ids, args.rate, 8192, vocab_size, args.drafts)
    outbox.send(worker.ready())
    epoch = 0
    while True:
        inbox.wait(1.0)
        for message in inbox.receive(1):
            if isinstance(message, Reset):
                epoch = message.epoch
                outbox.send(worker.ready(epoch))
            elif isinstance(message, ForwardBatch) and message.epoch == epoch:
                outbox.send(worker.step(message))


if __name__ == "__main__":
    main()
