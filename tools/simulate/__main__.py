"""Run the simulator: ``python -m tools.simulate --requests 10000 --rate 40 --policy fcfs,lpm --plot out.svg``.

Flags that take lists (``--policy``, ``--cache``, ``--conservativeness``, ``--chunk``) are compared: one
run for each combination, all on the same requests. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

from common.config import ServerConfig, save
from common.errors import ConfigError, QuintetError
from common.flags import build
from common.trace import TraceWriter
from tools.simulate.cost import CostModel
from tools.simulate.files import fit_cost, load
from tools.simulate.loop import Simulation
from tools.simulate.measure import Outcome, table
from tools.simulate.plot import draw
from tools.simulate.plugin import Plugin, load_plugin
from tools.simulate.worker import WorkerShape
from tools.simulate.workload import Workload, WorkloadSpec, generate

DEFAULT_COST = "5,60,200,10"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    spec, shape = WorkloadSpec(), WorkerShape()
    parser = argparse.ArgumentParser(
        prog="tools.simulate",
        description="Simulate the scheduler: its real step, a fake worker, a fake clock.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    work = parser.add_argument_group("requests")
    add = work.add_argument
    add("--requests", type=int, default=10_000, help="how many, turns of conversations included on average")
    add("--trace-file", type=Path, help="take them from a JSONL file or a recorded trace folder instead")
    add("--rate", type=float, default=spec.rate, help="arrivals per second")
    add("--arrivals", choices=["poisson", "bursty"], default="poisson", help="gaps between arrivals")
    add("--burstiness", type=float, default=spec.burstiness, help="coefficient of variation of bursty gaps")
    add("--prefixes", type=int, default=spec.prefixes, help="shared prefixes")
    add("--zipf", type=float, default=spec.zipf, help="exponent of their popularity")
    add("--prefix-len", type=int, default=spec.prefix_len, help="mean tokens of a shared prefix")
    add("--prompt-len", type=int, default=spec.prompt_len, help="mean tokens of the rest of a prompt")
    add("--output-len", type=int, default=spec.output_len, help="mean output tokens")
    add("--max-tokens", type=int, default=0, help="what clients ask for; 0: 1 to 8 times what they will get")
    add("--to-the-limit", action="store_true", help="outputs run to max_tokens instead of ending early")
    add("--multi-turn", type=float, default=spec.multi_turn, help="share of arrivals that are conversations")
    add("--turns", type=float, default=spec.turns, help="mean turns of a conversation")
    add("--think", type=float, default=spec.think_s, help="mean seconds between turns")
    add("--users", type=int, default=spec.users, help="users, Zipf popular")
    add("--urgent", type=float, default=0.0, help="share of requests with priority 20")
    add("--seed", type=int, default=0, help="of everything drawn")
    machine = parser.add_argument_group("worker")
    add = machine.add_argument
    add("--cost", default=DEFAULT_COST, help="a,b,c,d: ms per step, us per prefill token, us per decode row, ns per"
        " context token")  # fmt: skip
    add("--fit", type=Path, help="fit the cost to a recorded trace folder instead")
    add("--pages", type=int, default=shape.num_pages, help="KV pages")
    add("--page-size", type=int, default=shape.page_size, help="tokens per page")
    add("--context-length", type=int, default=shape.context_len, help="most positions of a request")
    compared = parser.add_argument_group("scheduler (comma separated values are compared)")
    add = compared.add_argument
    add("--policy", default="fcfs", help="fcfs, lpm, priority")
    add("--cache", default="on", help="on, off")
    add("--conservativeness", default="1.0", help="--schedule-conservativeness")
    add("--chunk", default="0", help="--chunked-prefill-size; 0: from the step cost")
    add("--max-running", type=int, default=256, help="--max-running-requests")
    add("--policy-file", type=Path, action="append", default=[], help="also compare the Policy or Tree in this file")
    out = parser.add_argument_group("output")
    out.add_argument("--plot", type=Path, help="picture of the comparison (.svg, .png)")
    out.add_argument("--trace", type=Path, help="record every step, for tools.replay (one folder per run)")
    out.add_argument("--check", action="store_true", help="verify invariants and tokens after every step (slow)")
    return parser


def make_spec(args: argparse.Namespace) -> WorkloadSpec:
    """The workload's flags."""
    return WorkloadSpec(
        num_requests=args.requests,
        rate=args.rate,
        arrivals=args.arrivals,
        burstiness=args.burstiness,
        prefixes=args.prefixes,
        zipf=args.zipf,
        prefix_len=args.prefix_len,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        max_tokens=args.max_tokens,
        to_the_limit=args.to_the_limit,
        multi_turn=args.multi_turn,
        turns=args.turns,
        think_s=args.think,
        users=args.users,
        urgent=args.urgent,
        context_len=args.context_length,
        seed=args.seed,
    )


def make_cost(args: argparse.Namespace) -> CostModel:
    """The cost model, from flags or fitted. Raises ConfigError."""
    if args.fit:
        model, quality, steps = fit_cost(args.fit)
        print(f"cost fitted to {steps} steps of {args.fit} (R^2 {quality:.3f}): {model}", file=sys.stderr)
        return model
    try:
        a, b, c, d = (float(part) for part in args.cost.split(","))
    except ValueError:
        raise ConfigError(f"--cost {args.cost!r}: four numbers, as in {DEFAULT_COST}") from None
    if min(a, b, c, d) < 0 or a + b + c <= 0:
        raise ConfigError(f"--cost {args.cost!r}: none may be negative, and a step must take time")
    return CostModel(a * 1e-3, b * 1e-6, c * 1e-6, d * 1e-9)


def make_configs(args: argparse.Namespace) -> dict[str, ServerConfig]:
    """One configuration per combination, named by what differs. Raises ConfigError."""
    axes = {
        "policy": args.policy.split(","),
        "cache": args.cache.split(","),
        "conservativeness": args.conservativeness.split(","),
        "chunk": args.chunk.split(","),
    }
    if unknown := set(axes["cache"]) - {"on", "off"}:
        raise ConfigError(f"--cache {','.join(unknown)}: on or off")
    configs = {}
    for values in product(*axes.values()):
        policy, cache, conservativeness, chunk = values
        config = build(
            {
                "schedule_policy": policy,
                "disable_radix_cache": cache == "off",
                "schedule_conservativeness": conservativeness,
                "chunked_prefill_size": chunk,
                "max_running_requests": args.max_running,
                "max_queued_requests": max(args.requests, 1) * 4,
                "page_size": args.page_size,
            }
        )
        named = [
            value if axis == "policy" else f"{axis} {value}"
            for (axis, options), value in zip(axes.items(), values, strict=True)
            if len(options) > 1
        ]
        configs[" ".join(named) or policy] = config
    return configs


def run_one(
    name: str,
    config: ServerConfig,
    args: argparse.Namespace,
    cost: CostModel,
    workload: Workload,
    plugin: Plugin | None = None,
) -> tuple[dict[str, float], list[Outcome]]:
    """Simulate one configuration: (numbers, what each client saw)."""
    trace = None
    if args.trace:
        trace = TraceWriter(args.trace / name.replace(" ", "-"), "scheduler", 0, 0, config=save(config))
    shape = WorkerShape(
        args.pages, args.page_size, args.context_length, workload.spec.vocab_size, max_slots=args.max_running
    )
    simulation = Simulation(config, shape, cost, workload, plugin, check=args.check, trace=trace)
    result = simulation.run()
    if trace is not None:
        trace.close()
    return result, list(simulation.recorder.outcomes.values())


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All runs of a command line; prints the table as they come. Raises ConfigError."""
    cost, spec = make_cost(args), make_spec(args)
    configs = make_configs(args)
    runs: list[tuple[str, ServerConfig, Plugin | None]] = [(name, config, None) for name, config in configs.items()]
    first = next(iter(configs.values()))
    runs += [(plugin.name, first, plugin) for plugin in map(load_plugin, args.policy_file)]
    results: dict[str, dict[str, float]] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for name, config, plugin in runs:
        workload = load(args.trace_file, spec) if args.trace_file else generate(spec)
        results[name], outcomes[name] = run_one(name, config, args, cost, workload, plugin)
        took, cpu, steps = (results[name][key] for key in ("wall_s", "cpu_s", "steps"))
        print(f"{name}: {steps:,.0f} steps simulated in {took:.1f} s ({cpu:.1f} s of CPU)", file=sys.stderr)
    print(f"step = {cost}; {args.pages} pages of {args.page_size} tokens\n")
    print(table(results))
    if args.plot:
        title = f"{len(next(iter(outcomes.values()))):,} requests, {spec.arrivals} arrivals; step = {cost}"
        draw(args.plot, title, results, outcomes)
    return {"cost": str(cost), "runs": results}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        print(json.dumps(compare(args)))
    except QuintetError as error:
        print(f"tools.simulate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ``| head`` ends it quietly
    sys.exit(main())
