"""Picture of a comparison: for each layer, the fraction of its elements that has changed, and the largest step."""

from __future__ import annotations

import importlib
from pathlib import Path

from weighbridge._comparing.differences import Comparison
from weighbridge._core.text.extras import needs_extra
from weighbridge.errors import InvalidArgument

FORMATS = (".png", ".svg", ".pdf")
_INCHES = 0.22
"""Height of a layer's bar with the space around it, in inches."""
_MOST_INCHES = 160.0
"""Tallest picture: at 120 dots an inch below the 65,536 dots that matplotlib can draw."""
_WIDE = 100
"""Ratio of the largest step to the smallest above which their scale is logarithmic."""


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the comparison starts.

    Raises:
        InvalidArgument: the format is unknown.
        FailedPrecondition: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidArgument(f"{str(path)!r} does not end in a picture format", fix=f"end it in {', '.join(FORMATS)}")
    with needs_extra("plot", "a picture"):
        importlib.import_module("matplotlib.figure")


def draw_layers(comparison: Comparison, path: Path) -> None:
    """Draw the layers of a comparison, in their order from top to bottom."""
    from matplotlib.figure import Figure

    layers = comparison.layers
    height = min(1.6 + _INCHES * len(layers), _MOST_INCHES)
    figure = Figure(figsize=(11, height), layout="constrained")
    total = comparison.total
    figure.suptitle(
        f"{comparison.before} to {comparison.after}: {total.fraction:.2%} of {total.elements:,} elements changed"
    )
    left, right = figure.subplots(1, 2, sharey=True)
    rows = range(len(layers))
    left.barh(rows, [100 * layer.found.fraction for layer in layers], color="tab:blue")
    left.set(xlabel="elements changed (%)", xlim=(0, None), ylim=(len(layers) - 0.5, -0.5))
    left.set_yticks(rows, [layer.name for layer in layers], fontsize=7)
    steps = [layer.found.step for layer in layers]
    right.plot(steps, rows, "o", color="tab:orange", markersize=4)
    right.set(xlabel="largest step")
    positive = [step for step in steps if step]
    if positive and max(positive) > _WIDE * min(positive):
        right.set_xscale("log")  # omits layers that have not changed
    else:
        right.set_xlim(0, None)
    for axes in (left, right):
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
