"""Read a trace: ``python -m tools.replay DIR`` (summary), ``--rid RID`` (one life), ``--perfetto``, ``--rerun``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from common.errors import QuintetError
from tools.replay.lives import Run, read_lives
from tools.replay.perfetto import write_perfetto
from tools.replay.picture import write_picture
from tools.replay.reader import Segment, TraceError, read_run
from tools.replay.rerun import rerun
from tools.replay.timeline import summary, timeline


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools.replay", description="What a recorded server did.")
    parser.add_argument("trace", type=Path, help="the --trace folder (its newest run), or one run's folder")
    parser.add_argument("--rid", action="append", default=[], help="the life of this request (a unique part will do)")
    parser.add_argument("--all", action="store_true", help="the life of every request")
    parser.add_argument("--perfetto", type=Path, metavar="JSON", help="Chrome trace events, for ui.perfetto.dev")
    parser.add_argument("--svg", type=Path, metavar="SVG", help="a picture of the run")
    parser.add_argument("--rerun", action="store_true", help="feed the recorded inputs to Scheduler.step again")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="with --rerun: another setting, as schedule_policy=lpm")  # fmt: skip
    return parser


def find(run: Run, part: str) -> list[str]:
    """The rids that contain ``part``. Raises TraceError when there is none."""
    found = [rid for rid in run.lives if part in rid]
    if not found:
        raise TraceError(f"--rid {part}: not among the {len(run.lives)} requests of the trace")
    return found


def show(args: argparse.Namespace, segments: list[Segment]) -> None:
    """Everything the command line asks for but the rerun."""
    run = read_lives(segments)
    rids = list(run.lives) if args.all else [rid for part in args.rid for rid in find(run, part)]
    for rid in rids:
        print(timeline(run, run.lives[rid]) + "\n")
    if args.perfetto:
        num_events = write_perfetto(args.perfetto, run, segments)
        print(f"{args.perfetto}: {num_events:,} events; open it at https://ui.perfetto.dev")
    if args.svg:
        write_picture(args.svg, run)
        print(f"{args.svg}: {len(run.lives)} requests")
    if not (rids or args.perfetto or args.svg):
        print(summary(run))
    cut = [segment.path.name for segment in segments if segment.truncated]
    if cut:
        print(f"(ends inside a record, its process was killed: {', '.join(cut)})")


def main(argv: list[str] | None = None) -> int:
    """Command line. 0; 1 when a rerun decided otherwise; 2 when the trace cannot be read."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.set and not args.rerun:
        parser.error("--set changes a --rerun; add --rerun")
    try:
        segments = read_run(args.trace)
        if args.rerun:
            reports = rerun(segments, args.set)
            print("\n".join(report.words for report in reports))
            return int(any(report.differs for report in reports))
        show(args, segments)
    except QuintetError as error:
        print(f"tools.replay: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ``| head`` ends it quietly
    sys.exit(main())
