"""The screen of single-step mode: what the scheduler knows, what it chose and why."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from common.messages import unpack_i32
from scheduler_proc.explain import why_waiting
from scheduler_proc.radix import Node
from scheduler_proc.request import Req, Status
from scheduler_proc.state import Pool
from tools.step.engine import Engine
from tools.step.style import Style, clip

KEYS = "space: step  r: ten  e: to the end  a: add  p: type a prompt  x: abort  k: kill worker  f: flush  q: quit"
_MAX_WAITING, _MAX_TREE, _MAX_EVENTS = 5, 8, 4


class Screen:
    """Draws an engine as lines of text."""

    def __init__(self, engine: Engine, style: Style) -> None:
        self.engine = engine
        self.style = style

    def lines(self, width: int, height: int) -> list[str]:
        """At most ``height`` lines of at most ``width`` columns; the keys are the last."""
        pool = self.engine.scheduler.state.need_pool()
        body = [
            *self._head(pool),
            *self._waiting(),
            *self._running(pool),
            *self._pages(pool, width),
            *self._tree(pool),
            *self._batch(pool),
            *self._tokens(),
        ]
        if len(body) > height - 1:
            left_out = self.style.dim(f"… {len(body) - height + 2} more lines: make the terminal taller")
            body = [*body[: height - 2], left_out]
        return [clip(line, width) for line in [*body, self.style.dim(KEYS)]]

    def _title(self, name: str, rest: str = "") -> str:
        return f"{self.style.bold(name)} {self.style.dim(rest)}".rstrip()

    def _name(self, slot: int, rid: str) -> str:
        return self.style.slot(slot, f"{letter(slot)} {rid:<4}")

    def _head(self, pool: Pool) -> Iterator[str]:
        engine, state = self.engine, self.engine.scheduler.state
        settings = state.config.scheduler
        free, cached = pool.allocator.num_free, pool.tree.num_evictable
        metrics = state.metrics
        yield (
            f"{self.style.bold('quintet')} step {engine.num_steps}, {engine.link.name}, policy"
            f" {settings.schedule_policy}, {len(pool.in_flight)} of {engine.depth} batches in flight,"
            f" decided in {engine.shown.took_s * 1e6:.0f} us"
        )
        yield self.style.soft(
            f"pool {pool.allocator.num_pages} pages of {pool.page_size}: {free} free, {cached} cached,"
            f" {pool.allocator.num_pages - free - cached} in use;"
            f" {plural(metrics.num_preemptions_total, 'preemption')};"
            f" growth reserved: {engine.scheduler.admission.ratio:.0%} of what may still come"
        )

    def _waiting(self) -> Iterator[str]:
        queue = list(self.engine.scheduler.state.queue)
        arriving = self.engine.num_arriving
        yield self._title("WAITING", str(len(queue)) + (f", {arriving} arrive with the next step" if arriving else ""))
        for req in queue[:_MAX_WAITING]:
            again = f", had {len(req.ids) - req.prompt_len} outputs before" if len(req.ids) > req.prompt_len else ""
            why = why_waiting(self.engine.scheduler, req)
            yield f"  {req.rid:<6} prompt {req.prompt_len}{again}  {self.style.alert(why)}"
        if len(queue) > _MAX_WAITING:
            yield self.style.dim(f"  and {len(queue) - _MAX_WAITING} more")

    def _running(self, pool: Pool) -> Iterator[str]:
        running = self.engine.running()
        yield self._title("RUNNING", f"{len(running)} of {pool.max_running}")
        for req in running:
            yield f"  {self._name(req.slot, req.rid)} {self._state_of(pool, req)}"

    def _state_of(self, pool: Pool, req: Req) -> str:
        table = pool.table
        computed, known = int(table.computed[req.slot]), int(table.known[req.slot])
        pages = plural(len(req.pages), "page")
        if req.status is not Status.RUNNING:
            return self.style.alert(f"{req.status.name.lower()}: its last row has not returned") + f"  {pages}"
        if not table.decoding[req.slot] or known == req.prompt_len:
            done = bar(computed, known)
            return f"prefill {done} {computed}/{known} computed  {pages}"
        outputs = known - req.prompt_len
        text = self.engine.words.decode(self.engine.texts[req.rid][-12:]).replace("\n", "⏎")
        return (
            f"decode  {bar(outputs, req.max_len - req.prompt_len)} {outputs}/{req.max_len - req.prompt_len} tokens"
            f"  {pages}  {self.style.dim(text)}"
        )

    def _pages(self, pool: Pool, width: int) -> Iterator[str]:
        cells = page_cells(pool)
        per_cell = -(-len(cells) // (6 * (width - 4)))
        legend = ". free  # cached  + shared  A-Z one request's (a-z: in the cache, too)"
        yield self._title("PAGES", legend + (f"  one character is {per_cell} pages" if per_cell > 1 else ""))
        shown = cells[::per_cell]
        columns = min(width - 4, max(len(shown), 1))
        for at in range(0, len(shown), columns):
            row = shown[at : at + columns]
            yield "  " + "".join(self._cell(text, slot) for text, slot in row)

    def _cell(self, text: str, slot: int) -> str:
        return self.style.soft(text) if slot < 0 else self.style.slot(slot, text)

    def _tree(self, pool: Pool) -> Iterator[str]:
        tree = pool.tree
        nodes = list(tree.nodes())
        yield self._title("TREE", f"{len(nodes)} nodes, {tree.num_pages} pages, {tree.num_locked} of them locked")
        children: dict[int, list[Node]] = {}
        known = {id(node) for node in nodes}
        for node in nodes:
            children.setdefault(id(node.parent) if id(node.parent) in known else 0, []).append(node)
        rows = list(self._branch(children, 0, ""))
        yield from rows[:_MAX_TREE]
        if len(rows) > _MAX_TREE:
            yield self.style.dim(f"  and {len(rows) - _MAX_TREE} more")

    def _branch(self, children: dict[int, list[Node]], parent: int, indent: str) -> Iterator[str]:
        for node in sorted(children.get(parent, []), key=lambda node: node.number):
            text = self.engine.words.decode(unpack_i32(node.key)[:6].tolist()).replace("\n", "⏎")
            use = self.style.soft(f"used by {node.locks}") if node.locks else self.style.dim(f"last use {node.stamp}")
            yield f"  {indent}└ {plural(len(node.pages), 'page')} {self.style.dim(f'“{text}…”')} {use}"
            yield from self._branch(children, id(node), indent + "  ")

    def _batch(self, pool: Pool) -> Iterator[str]:
        shown, batch = self.engine.shown, self.engine.shown.batch
        if batch is None or not batch.slots:
            yield self._title("BATCH", "none: nothing can run" if not pool.in_flight else "none: enough is in flight")
        else:
            slots, chunks = unpack_i32(batch.slots).tolist(), unpack_i32(batch.num_tokens).tolist()
            decode, prefill = plural(chunks.count(0), "decode row"), plural(sum(chunks), "prefill token")
            counts = f"{decode} first, then {prefill} within the budget"
            yield self._title("BATCH", f"{batch.step}: {counts}")
            new = iter(unpack_i32(batch.new_pages).tolist())
            for slot, chunk, count in zip(slots, chunks, unpack_i32(batch.num_new_pages).tolist(), strict=True):
                req = pool.table.reqs[slot]
                pages = [next(new) for _ in range(count)]
                if req is not None:
                    yield f"  {self._name(slot, req.rid)} {self._row(pool, req, chunk, pages)}"
        for event in shown.events[:_MAX_EVENTS]:
            yield f"  {self.style.alert('•')} {event}"

    def _row(self, pool: Pool, req: Req, chunk: int, new: list[int]) -> str:
        if chunk:
            end, whole = req.scheduled_len, int(pool.table.known[req.slot])
            cached = self.engine.shown.begun.get(req.rid)
            admitted = "" if cached is None else f"admitted with {cached} of {whole} tokens cached; "
            rest = "samples its next token" if end == whole else f"{whole - end} left for later: the budget is used"
            return f"{admitted}prefill {end - chunk}..{end - 1}, {rest}"
        page = f"; its pages are full: takes page {new[0]}" if new else ""
        return f"decode position {int(pool.table.known[req.slot]) - 1 + int(pool.table.rows[req.slot]) - 1}{page}"

    def _tokens(self) -> Iterator[str]:
        shown = self.engine.shown
        yield self._title("SAMPLED", f"by batch {shown.returned_step}" if shown.returned else "")
        for row in shown.returned:
            if row.ids:
                text = self.engine.words.decode(row.ids).replace("\n", "⏎")
                yield f"  {row.rid:<6} {' '.join(map(str, row.ids))}  {self.style.soft(repr(text))}"


def letter(slot: int) -> str:
    """The letter a slot's pages are drawn with."""
    return chr(ord("A") + slot % 26)


def plural(n: int, noun: str) -> str:
    """``1 page``, ``2 pages``"""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def bar(done: int, whole: int, width: int = 10) -> str:
    """``████░░░░░░``"""
    filled = round(width * min(done / max(whole, 1), 1.0))
    return "█" * filled + "░" * (width - filled)


def page_cells(pool: Pool) -> list[tuple[str, int]]:
    """(character, slot or -1) per page."""
    cached = np.zeros(pool.allocator.num_pages, dtype=np.bool_)
    for node in pool.tree.nodes():
        cached[node.pages] = True
    cells = [("#" if is_cached else ".", -1) for is_cached in cached.tolist()]
    holders = np.zeros(pool.allocator.num_pages, dtype=np.int32)
    for req in pool.table.taken():
        holders[req.pages] += 1
        for page in req.pages:
            mark = letter(req.slot)
            cells[page] = (mark.lower() if cached[page] else mark, req.slot)
    for page in np.flatnonzero(holders > 1).tolist():
        cells[page] = ("+", -1)
    return cells
