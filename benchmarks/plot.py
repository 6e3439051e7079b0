"""Plots of the figures. Needs matplotlib, which ``weighbridge[bench]`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import Figures

_PANELS = (
    ("push: the rank is held / one warm copy", "held_to_copy"),
    ("push: first byte to ready / one warm copy", "ready_to_copy"),
    ("push: stream / raw grpcio", "stream_to_raw"),
    ("pull / one warm copy", "pull_to_copy"),
    ("pull / raw grpcio", "pull_to_raw"),
)


def plot_cases(all_figures: Sequence[Figures], path: Path) -> None:
    """Ratios of times over the number of clients, a line for each size, cut and lane, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3).flat
    lines: dict[str, list[Figures]] = {}
    for each in all_figures:
        case = each.case
        lines.setdefault(f"{case.gigabytes:g} GB, {case.cut}, {case.lane}", []).append(each)
    for ax, (title, name) in zip(axes, _PANELS, strict=False):
        for label, line in lines.items():
            points = [(each.case.clients, ratio) for each in line if (ratio := each.ratio(name)) is not None]
            if points:
                ax.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        ax.set(title=title, xlabel="clients", ylim=(0, None))
        ax.set_xscale("log", base=2)
        ax.set_xticks(clients := sorted({each.case.clients for each in all_figures}), map(str, clients))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    legend = figure.axes[-1]
    legend.axis("off")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend.legend(handles, labels, loc="center")
    figure.savefig(path, format="png", dpi=120)


def plot_peers(seconds: dict[str, float], title: str, path: Path) -> None:
    """Times side by side, the shortest on top, on a logarithmic axis, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 0.35 * len(seconds)), layout="constrained")
    ax = figure.subplots()
    names = sorted(seconds, key=seconds.__getitem__, reverse=True)
    bars = ax.barh(
        names,
        [seconds[name] for name in names],
        color=["tab:orange" if name.startswith("weighbridge") else "tab:blue" for name in names],
    )
    ax.bar_label(bars, fmt="%.3g s", padding=3)
    ax.set(title=title, xlabel="seconds")
    ax.set_xscale("log")
    ax.margins(x=0.15)
    figure.savefig(path, format="png", dpi=120)
