"""Single-step mode: ``python -m tools.step`` (fake worker) or ``python -m tools.step --model X`` (the real one)."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import termios
import tty
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common.config import ServerConfig
from common.errors import QuintetError
from common.flags import build
from tools.simulate.worker import WorkerShape
from tools.step.engine import Engine
from tools.step.links import FakeLink, Link, ProcessLink
from tools.step.style import Style, to_svg
from tools.step.view import Screen
from tools.step.words import ModelWords, PlainWords, Words

START_TIMEOUT_S = 300.0
_END_TURNS = 2000
PROMPTS = (
    "The story of the old king who lived by the river and read letters from the city every morning",
    "The story of the old king who lived by the river and forgot the name of his own sister",
    "The story of the old king who lived by the river",
    "How do people find water in the mountain when the winter is long",
    "Write some words about music",
    "The story of the young bird that sings over the quiet harbor in the evening",
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools.step", description="The scheduler, one step per key.")
    add = parser.add_argument
    add("--model", default="", help="run the real worker with this model (folder, GGUF or Hugging Face id)")
    add("--requests", type=int, default=5, help="requests that wait at the start")
    add("--max-tokens", type=int, default=24, help="most output tokens of a request")
    add("--page-size", type=int, default=4, help="tokens per page")
    add("--max-total-tokens", type=int, default=80, help="tokens the pool holds: few, so that it gets full")
    add("--max-running-requests", type=int, default=4)
    add("--chunked-prefill-size", type=int, default=16, help="most prefill tokens in a step")
    add("--schedule-policy", default="fcfs", choices=["fcfs", "lpm", "priority"])
    add("--schedule-conservativeness", type=float, default=0.3, help="low: admits boldly, so preemptions are seen")
    add("--overlap", action="store_true", help="two batches in flight, as the server runs")
    add("--keys", default="", help="press these keys, print the last screen and end")
    add("--svg", type=Path, help="with --keys: the last screen as a picture")
    add("--width", type=int, default=0, help="columns; 0: the terminal's")
    add("--height", type=int, default=0, help="lines; 0: the terminal's")
    add("--no-color", action="store_true")
    return parser


def make_config(args: argparse.Namespace) -> ServerConfig:
    """The server's configuration with this command line's settings. Raises ConfigError."""
    settings = {
        name: getattr(args, name)
        for name in (
            "page_size",
            "max_total_tokens",
            "max_running_requests",
            "chunked_prefill_size",
            "schedule_policy",
            "schedule_conservativeness",
        )
    }
    settings["disable_overlap_schedule"] = not args.overlap
    if args.model:
        settings["model"] = args.model
    return build(settings)


def make_engine(args: argparse.Namespace) -> Engine:
    """Scheduler and worker, ready. Raises ConfigError."""
    config = make_config(args)
    link: Link
    words: Words
    if args.model:
        from worker_proc.prepare import resolve

        folder = resolve.resolve(config.model).folder
        config = msgspec.structs.replace(config, model_dir=str(folder))
        words = ModelWords(folder)
        log = Path(tempfile.gettempdir()) / f"quintet-step-{os.getpid()}.log"
        print(f"starting the worker (its log: {log}) ...", file=sys.stderr)
        link = ProcessLink(config, log)
    else:
        words = PlainWords()
        pages = max(args.max_total_tokens // args.page_size, 1)
        shape = WorkerShape(pages, args.page_size, 4096, words.vocab_size, args.max_running_requests)
        link = FakeLink(shape, lambda rid: 14 + zlib.crc32(rid.encode()) % 30)
    engine = Engine(config, link, words, real_time=bool(args.model))
    try:
        engine.start(START_TIMEOUT_S)
    except BaseException:
        link.close()
        raise
    return engine


class Session:
    """Keys to what they do."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.max_tokens = args.max_tokens
        self._prompts = itertools.cycle(PROMPTS)
        for _ in range(args.requests):
            self.add(next(self._prompts))

    def add(self, prompt: str) -> None:
        """A request with this prompt."""
        self.engine.add(prompt, self.max_tokens)

    def press(self, key: str) -> bool:
        """Do what a key does; False when it ends the session."""
        engine = self.engine
        match key:
            case " " | "\r" | "\n" | "s":
                engine.step()
            case "r":
                for _ in range(10):
                    engine.step()
            case "e":
                for _ in range(_END_TURNS):
                    if engine.idle:
                        break
                    engine.step()
            case "a":
                self.add(next(self._prompts))
                engine.step()
            case "x":
                if running := engine.running():
                    engine.abort(running[0].rid)
                    engine.step()
            case "k":
                engine.kill_worker(START_TIMEOUT_S)
            case "f":
                engine.flush()
                engine.step()
            case "q" | "\x03" | "\x04" | "":
                return False
        return True


@contextmanager
def raw_terminal() -> Iterator[int]:
    """Keys one at a time, without echo; the terminal is as before afterwards, however this ends."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    sys.stdout.write("\x1b[?1049h\x1b[?25l")  # another screen, no cursor
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def interact(session: Session, screen: Screen, args: argparse.Namespace) -> None:
    """Until ``q``."""
    with raw_terminal() as fd:
        going = True
        while going:
            size = os.get_terminal_size(sys.stdout.fileno())
            lines = screen.lines(args.width or size.columns, args.height or size.lines)
            sys.stdout.write("\x1b[H\x1b[2J" + "\r\n".join(lines))
            sys.stdout.flush()
            key = os.read(fd, 1).decode("latin-1")
            if key == "p":
                if prompt := read_line(fd):
                    session.add(prompt)
                    session.engine.step()
            else:
                going = session.press(key)


def read_line(fd: int) -> str:
    """A prompt typed by the user, until Enter; Escape takes it back."""
    data = b""
    while True:
        sys.stdout.write("\r\x1b[K> " + data.decode("utf-8", "replace"))
        sys.stdout.flush()
        key = os.read(fd, 1)
        if key in (b"\r", b"\n", b""):
            return data.decode("utf-8", "replace").strip()
        if key == b"\x1b":
            return ""
        data = data[:-1] if key in (b"\x7f", b"\x08") else data + key


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.keys and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("needs a terminal; without one say which keys to press: --keys 'ssss'")
    try:
        engine = make_engine(args)
    except QuintetError as error:
        print(f"tools.step: {error}", file=sys.stderr)
        return 2
    try:
        session = Session(engine, args)
        screen = Screen(engine, Style(color=not args.no_color))
        if args.keys:
            for key in args.keys:
                session.press(key)
            width = args.width or 110
            lines = screen.lines(width, args.height or 60)
            print("\n".join(lines))
            if args.svg:
                args.svg.write_text(to_svg(lines, width), encoding="utf-8")
        else:
            interact(session, screen, args)
    except QuintetError as error:
        print(f"tools.step: {error}", file=sys.stderr)
        return 1
    finally:
        engine.link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
