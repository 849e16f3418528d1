"""The comparison of runs as one picture (SVG, PNG or PDF by the file's ending)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.errors import ConfigError
from tools.simulate.measure import Outcome

_BARS = (
    ("ttft_p99_ms", "TTFT p99, ms"),
    ("itl_p99_ms", "ITL p99, ms"),
    ("hit_rate", "hit rate"),
    ("preemptions_per_request", "preemptions per request"),
    ("jain_users", "fairness between users (Jain)"),
)


def draw(path: Path, title: str, results: dict[str, dict[str, float]], outcomes: dict[str, list[Outcome]]) -> None:
    """Write the picture: TTFT as a distribution, the rest as bars. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'quintet[bench]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quintet"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    colors = pyplot.get_cmap("tab10").colors
    first, *others = axes.flat
    for color, (name, done) in zip(colors * 3, outcomes.items(), strict=False):
        ttft = np.sort([o.first - o.arrived for o in done if o.first >= 0]) * 1e3
        if len(ttft):
            shown = np.linspace(0, len(ttft) - 1, min(len(ttft), 500)).astype(int)
            first.plot(ttft[shown], (shown + 1) / len(ttft), label=name, color=color)
    first.set(xscale="log", xlabel="TTFT, ms", ylabel="share of requests", title="TTFT")
    first.legend(fontsize=8)
    first.grid(alpha=0.3)
    for axis, (key, label) in zip(others, _BARS, strict=True):
        values = [result[key] for result in results.values()]
        bars = axis.barh(list(results), values, color=(colors * 3)[: len(values)])
        labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
        axis.set_title(label, fontsize=10)
        axis.invert_yaxis()
        axis.set_xlim(0, max([*values, 1e-3]) * 1.2)
        axis.tick_params(labelsize=8)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)
