"""Single-step mode: driven by keys, and by a person's fingers in a real terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pyte
import pytest

from tools.step.__main__ import Session, make_engine, make_parser
from tools.step.__main__ import main as step_main
from tools.step.style import Style, clip, plain, to_svg
from tools.step.view import Screen, page_cells

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


def session(*flags: str) -> Session:
    args = make_parser().parse_args(list(flags))
    return Session(make_engine(args), args)


def text(of: Session, width: int = 120, height: int = 80) -> str:
    return "\n".join(Screen(of.engine, Style(color=False)).lines(width, height))


def press(of: Session, keys: str) -> Session:
    for key in keys:
        assert of.press(key)
        of.engine.scheduler.check_invariants()
    return of


def test_the_first_step_admits_in_order_and_says_what_the_others_wait_for() -> None:
    screen = text(press(session(), "s"))
    assert "WAITING 4" in screen and "RUNNING 1 of 4" in screen
    assert "A r1   admitted with 0 of 19 tokens cached; prefill 0..15, 3 left for later: the budget is used" in screen
    assert "r2     prompt 19  prefix: r1 is computing what it shares with it" in screen


def test_every_step_shows_the_tokens_its_result_brought() -> None:
    one = press(session("--requests", "1"), "sss")
    (row,) = one.engine.shown.returned
    assert one.engine.texts["r1"] == list(row.ids)
    assert f"r1     {row.ids[0]}  {one.engine.words.decode(row.ids)!r}" in text(one)


def test_a_full_pool_preempts_who_has_least_and_everyone_still_ends() -> None:
    many = session()
    shown = ""
    for _ in range(40):
        shown += text(press(many, "s"))
    assert "preempted: the pool is full and it has generated least" in shown
    assert "had 9 outputs before" in shown and "pages: " in shown
    press(many, "e")
    assert many.engine.idle and "WAITING 0" in text(many)
    assert all(2 <= len(ids) <= 24 for ids in many.engine.texts.values())


def test_the_page_map_has_one_character_per_page_and_agrees_with_the_pool() -> None:
    some = press(session(), "sssss")
    pool = some.engine.scheduler.state.need_pool()
    cells = [character for character, _ in page_cells(pool)]
    assert len(cells) == pool.allocator.num_pages
    assert cells.count(".") == pool.allocator.num_free
    shared = [page for page, character in enumerate(cells) if character == "+"]
    assert shared and all(pool.allocator.refs[page] >= 3 for page in shared)


def test_a_killed_worker_loses_no_token() -> None:
    calm, shaken = press(session(), "ssssssss"), press(session(), "ssssssss")
    press(shaken, "k")
    assert "crash: " in text(press(shaken, "s"))
    press(calm, "e")
    press(shaken, "e")
    assert shaken.engine.texts == calm.engine.texts


def test_an_abort_gives_the_pages_back() -> None:
    one = press(session("--requests", "1"), "ssss")
    press(one, "x")
    assert "r1 finished: abort" in text(one)
    press(one, "s")
    pool = one.engine.scheduler.state.need_pool()
    assert pool.num_available == pool.allocator.num_pages


def test_flush_is_refused_while_requests_run_and_empties_the_tree_afterwards() -> None:
    one = press(session("--requests", "1"), "sssf")
    assert "flush: 409" in text(one)
    press(one, "e")
    assert "0 nodes" in text(press(one, "f"))


def test_two_batches_in_flight_give_the_same_tokens() -> None:
    plain_run, overlapped = press(session(), "e"), press(session("--overlap"), "ss")
    assert "2 of 2 batches in flight" in text(overlapped)
    press(overlapped, "e")
    assert overlapped.engine.texts == plain_run.engine.texts


def test_a_small_screen_says_that_lines_are_missing() -> None:
    lines = text(press(session(), "sss"), 60, 12).splitlines()
    assert len(lines) == 12 and all(len(line) <= 60 for line in lines)
    assert "more lines: make the terminal taller" in lines[-2]


def test_clip_counts_what_is_seen_and_closes_colours() -> None:
    colored = Style().slot(0, "abcdef") + "ghi"
    assert plain(clip(colored, 5)) == "abcd…" and clip(colored, 5).endswith("\x1b[0m")
    assert clip(colored, 9) == colored


def test_the_picture_has_every_character_of_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xml.etree import ElementTree

    assert step_main(["--keys", "ssss", "--svg", str(tmp_path / "a.svg")]) == 0
    shown = plain(capsys.readouterr().out)
    drawn = "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert drawn.replace(" ", "").replace("\n", "") == shown.replace(" ", "").replace("\n", "")
    assert to_svg(["a < b & c"], 20).count("&lt;") == 1


def test_the_readmes_picture_is_what_twelve_steps_look_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xml.etree import ElementTree

    assert step_main(["--keys", "s" * 12, "--svg", str(tmp_path / "a.svg")]) == 0
    pictures = [ElementTree.parse(path).getroot() for path in (tmp_path / "a.svg", IMAGES / "step.svg")]
    drawn, kept = (re.sub(r"decided in .*", "", "\n".join(picture.itertext())) for picture in pictures)
    assert drawn == kept, "draw it again: python -m tools.step --keys ssssssssssss --svg docs/images/step.svg"
    assert "![single-step mode](docs/images/step.svg)" in (ROOT / "README.md").read_text()


def test_without_a_terminal_it_says_what_to_do() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.step"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert result.returncode == 2 and "--keys 'ssss'" in result.stderr


class Terminal:
    """A real pseudo-terminal with a terminal emulator's screen behind it."""

    def __init__(self, *flags: str, columns: int = 110, rows: int = 44, timeout_s: float = 120) -> None:
        self._timeout_s = timeout_s
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.child = pexpect.spawn(
            sys.executable, ["-m", "tools.step", *flags], cwd=str(ROOT), dimensions=(rows, columns), timeout=60
        )

    def wait_for(self, words: str, last: str = "q: quit") -> str:
        """Until the screen shows ``words`` and is drawn to its ``last``; returns the whole screen."""
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            shown = "\n".join(self.screen.display)
            if words in shown and last in shown:
                return shown
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                break
        raise AssertionError(f"{words!r} never came:\n" + "\n".join(self.screen.display))


def test_in_a_terminal_each_key_is_a_step_and_q_leaves_it_as_it_was() -> None:
    terminal = Terminal()
    first = terminal.wait_for("q: quit")
    assert "quintet step 0, fake worker" in first and "WAITING 0, 5 arrive with the next step" in first
    terminal.child.send(" ")
    assert "RUNNING 1 of 4" in terminal.wait_for("quintet step 1,")
    terminal.child.send("s")
    terminal.wait_for("quintet step 2,")
    terminal.child.send("r")
    screen = terminal.wait_for("quintet step 12,")
    assert "SAMPLED by batch" in screen and "BATCH 12" in screen
    terminal.child.send("p")
    terminal.wait_for("> ", "> ")
    terminal.child.send("the old king sleeps\r")
    assert "r6" in terminal.wait_for("quintet step 13,")
    terminal.child.send("k")
    terminal.wait_for("the worker was killed")
    terminal.child.send("q")
    terminal.child.expect(pexpect.EOF)
    terminal.child.close()
    assert terminal.child.exitstatus == 0
    assert b"\x1b[?1049l" in (terminal.child.before or b""), "the terminal's own screen comes back"
