"""Quintet beside its peers: the same requests, one server after the other, medians and ratios.

    python -m bench.peers --model-dir DIR --vllm PATH/bin/vllm --llama-server PATH --gguf BF16.gguf \
        --openvino PATH/bin/python --openvino-model DIR

OpenVINO GenAI takes part without HTTP, in the cases its batching can run (``openvino_peer.py``).

Servers run one at a time. Each round starts every server once and sends it every workload; the
figures are medians over the rounds. The table gives each peer's figure and ours divided by it.
CPU seconds per 1,000 output tokens are given for every process and for the load generator. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import load, servers, workloads
from bench.serve_bench import Options
from bench.servers import Running, ServerSpec


@dataclass(frozen=True)
class Case:
    """A workload at a concurrency, and the figure compared."""

    workload: str
    concurrency: int
    n: int
    figure: str

    @property
    def name(self) -> str:
        """``short -c 8``."""
        return f"{self.workload} -c {self.concurrency}"


CASES = (
    Case("decode", 1, 3, "out_tok_s"),
    Case("short", 8, 48, "out_tok_s"),
    Case("short", 32, 128, "out_tok_s"),
    Case("shared-prefix", 8, 32, "req_s"),
    Case("long-prompt", 4, 16, "in_tok_s"),
    Case("multi-turn", 8, 40, "req_s"),
    Case("mixed", 8, 40, "out_tok_s"),
    Case("json", 8, 24, "req_s"),
)

Results = dict[str, dict[str, list[dict[str, Any]]]]
"""server -> case -> one summary per round."""


def run_case(server: Running, case: Case) -> dict[str, Any]:
    """One workload on one server; the summary with CPU seconds per 1,000 output tokens by process."""
    options = Options(server.url, server.spec.model, case.workload, case.concurrency, case.n, label=server.spec.name)
    found = load.put(server, options)
    for error in found.run.errors[:3]:
        print(f"{server.spec.name} {case.name}: {error}", file=sys.stderr)
    return found.summary


def run_round(specs: list[ServerSpec], cases: list[Case], results: Results, log_path: str, settle_s: float) -> None:
    """Start each server once, leave it alone for ``settle_s``, and send it every case; appends to ``results``."""
    for spec in specs:
        with servers.serve(spec, log_path=log_path) as server:
            time.sleep(settle_s)
            for case in cases:
                summary = run_case(server, case)
                results.setdefault(spec.name, {}).setdefault(case.name, []).append(summary)
                print(f"{spec.name:12} {case.name:20} {json.dumps(summary)}", flush=True)


def run_openvino(args: argparse.Namespace, cases: list[Case], results: Results) -> None:
    """The cases that need no server, in OpenVINO's own interpreter; appends to ``results``."""
    work = [
        {
            "name": case.name, "concurrency": case.concurrency,
            "warmup": [asdict(job) for job in workloads.jobs(case.workload, 2, seed=1)],
            "jobs": [asdict(job) for job in workloads.jobs(case.workload, case.n, seed=0)],
        }
        for case in cases if case.workload not in ("multi-turn", "json")
    ]  # fmt: skip
    script = Path(__file__).with_name("openvino_peer.py")
    done = subprocess.run(
        [args.openvino, str(script), args.openvino_model], input=json.dumps(work), capture_output=True, text=True
    )
    if done.returncode:
        print(f"openvino: {done.stderr[-2000:]}", file=sys.stderr)
    for line in done.stdout.splitlines():
        summary = json.loads(line)
        results.setdefault("openvino", {}).setdefault(summary["name"], []).append(summary)
        print(f"{'openvino':12} {summary['name']:20} {line}", flush=True)


def median(results: Results, server: str, case: Case, figure: str) -> float:
    """Median over the rounds; nan where the server did not run the case."""
    rounds = results.get(server, {}).get(case.name, [])
    values = [row[figure] for row in rounds if not row["errors"] and figure in row]
    return statistics.median(values) if values else float("nan")


def table(results: Results, cases: list[Case]) -> str:
    """A Markdown table: per case and server the figure, TTFT and ITL medians, and the ratio of ours to it."""
    names = sorted(results, key=lambda name: name != "quintet")
    lines = ["| workload | figure | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for case in cases:
        ours = median(results, "quintet", case, case.figure)
        cells = []
        for name in names:
            value = median(results, name, case, case.figure)
            itl, ttft = (median(results, name, case, key) for key in ("itl_ms_p50", "ttft_ms_p50"))
            ratio = "" if name == "quintet" else f", ours {ours / value:.2f}x"
            cells.append(f"{value:g} (ITL {itl:g} ms, TTFT {ttft:g} ms{ratio})")
        lines.append(f"| {case.name} | {case.figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def specs_from(args: argparse.Namespace) -> list[ServerSpec]:
    """The servers named on the command line, ours first."""
    flags = args.quintet_flag
    specs = [servers.quintet(*flags, model=args.model_dir)]
    if args.without_drafts:
        plain = [*flags, "--speculative-algorithm", "none"]
        specs.append(servers.quintet(*plain, model=args.model_dir, name="without drafts"))
    if args.vllm:
        specs.append(servers.vllm_cpu(args.vllm, args.model_dir, args.vllm_dtype, args.vllm_flag))
    if args.llama_server:
        specs.append(servers.llama_cpp(args.llama_server, args.gguf, args.llama_flag))
    return specs


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", default="", help="safetensors folder; empty: the default model (ours only)")
    parser.add_argument("--vllm", default="", help="the vllm executable of a vllm-cpu environment")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="its --dtype: float32 where it is faster in that")
    parser.add_argument("--llama-server", default="", help="the llama-server executable")
    parser.add_argument("--gguf", default="", help="bf16 GGUF of the same weights for llama.cpp")
    parser.add_argument("--openvino", default="", help="Python of an environment with openvino-genai")
    parser.add_argument("--openvino-model", default="", help="the folder optimum-cli exported for it")
    parser.add_argument("--quintet-flag", action="append", default=[], help="further flag for launch.py; repeatable")
    parser.add_argument("--without-drafts", action="store_true", help="ours with --speculative-algorithm none, too")
    parser.add_argument("--vllm-flag", action="append", default=[], help="further flag for vLLM; repeatable")
    parser.add_argument("--llama-flag", action="append", default=[], help="further flag for llama-server; repeatable")
    parser.add_argument("--case", action="append", default=[], help="only this case, e.g. 'short -c 8'; repeatable")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=15.0, help="wait so long once a server is ready")
    parser.add_argument("--log", default="/dev/null", help="where the servers' output goes")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.case or case.name in args.case]
    if not cases:
        parser.error(f"no such case; there are {', '.join(repr(case.name) for case in CASES)}")
    results: Results = {}
    for number in range(args.runs):
        # In turn the first: where a hypervisor takes unused memory back, it is slow for who comes first after that.
        specs = specs_from(args)
        first = number % len(specs)
        run_round(specs[first:] + specs[:first], cases, results, args.log, args.settle_s)
        if args.openvino:
            run_openvino(args, cases, results)
    print(table(results, cases))
    medians = {name: {case.name: median(results, name, case, case.figure) for case in cases} for name in results}
    print(json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
