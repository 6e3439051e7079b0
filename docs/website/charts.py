"""Bars with the range of their rounds, as SVG that is read on light and on dark ground, without a script or a font of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _LABELS, _FIGURES, _MARGIN = 860, 300, 110, 16
"""Of the picture, of the column of labels, of that of figures, and around all, in pixels."""
_ROW, _BAR, _GAP = 24, 14, 12
_STYLE = """\
<style>
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2328; }
  .ground { fill: #ffffff; } .title { font-size: 15px; font-weight: 600; } .faint { fill: #59636e; font-size: 12px; }
  .group { font-weight: 600; } .axis { stroke: #d1d9e0; } .range { stroke: #1f2328; }
  .ours { fill: #4051b5; } .more { fill: #9fa8da; } .theirs { fill: #8c959f; } .limit { fill: #c2c8ce; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8eb; } .ground { fill: #1b1d23; } .faint { fill: #a2abb5; } .axis { stroke: #3a3f47; } .range { stroke: #e6e8eb; }
    .ours { fill: #8a98f0; } .more { fill: #5360b8; } .theirs { fill: #7d8590; } .limit { fill: #565d66; }
  }
</style>"""


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: what was measured.
        parts: kinds of its parts, and their lengths, from the left.
        low: least of all rounds, as long as the bar would be.
        high: most of all rounds; with ``low`` equal to it, no range is drawn.
    """

    label: str
    parts: Sequence[tuple[str, float]]
    low: float = 0.0
    high: float = 0.0

    @property
    def length(self) -> float:
        """All parts together."""
        return sum(length for _, length in self.parts)


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: what it shows.
        notes: lines below the title: machine, date, where the figures are.
        kinds: of parts, in the order of the legend: ``ours``, ``more``, ``theirs`` or ``limit``, and what each means.
        groups: headings, and the bars under each.
        unit: of lengths.
    """

    title: str
    notes: Sequence[str]
    kinds: Mapping[str, str]
    groups: Mapping[str, Sequence[Bar]]
    unit: str = "s"

    def svg(self) -> str:
        """The picture."""
        lines = list(self._rows())
        height = int(lines.pop())
        size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title described">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="described">{escape(self._said())}</desc>',
            _STYLE,
            f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="6"/>',
        ]
        return "\n".join([*head, *lines, "</svg>", ""])

    def _said(self) -> str:
        """The figures, for who does not see the bars."""
        return "; ".join(
            f"{heading}: " + ", ".join(f"{bar.label} {_figure(bar.length)} {self.unit}" for bar in bars)
            for heading, bars in self.groups.items()
        )

    def _rows(self) -> Iterator[str]:
        """Lines of the picture from top to bottom, and last its height."""
        y = _MARGIN + 16
        yield _text(_MARGIN, y, self.title, "title")
        for note in self.notes:
            y += 18
            yield _text(_MARGIN, y, note, "faint")
        x = _MARGIN
        y += 14
        for kind, meaning in self.kinds.items():
            yield f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12" rx="2"/>'
            yield _text(x + 18, y + 11, meaning, "faint")
            x += 18 + 7 * len(meaning) + 24
        y += 22
        longest = max(max(bar.length, bar.high) for bars in self.groups.values() for bar in bars)
        scale = (_WIDTH - _LABELS - _FIGURES - 2 * _MARGIN) / longest
        left = _MARGIN + _LABELS
        for heading, bars in self.groups.items():
            y += _GAP + 12
            yield _text(_MARGIN, y, heading, "group")
            y += 6
            yield f'<line class="axis" x1="{left}" y1="{y}" x2="{left}" y2="{y + _ROW * len(bars)}"/>'
            for bar in bars:
                yield from self._bar(bar, left, y, scale)
                y += _ROW
        yield str(y + _MARGIN)

    def _bar(self, bar: Bar, left: float, y: float, scale: float) -> Iterator[str]:
        middle = y + _ROW / 2
        yield _text(left - 10, middle + 4.5, bar.label, end=True)
        x = left
        for kind, length in bar.parts:
            yield (
                f'<rect class="{kind}" x="{x:.1f}" y="{middle - _BAR / 2:.1f}" '
                f'width="{max(length * scale, 1):.1f}" height="{_BAR}"/>'
            )
            x += length * scale
        if bar.high > bar.low:
            start, end = left + bar.low * scale, left + bar.high * scale
            yield f'<line class="range" x1="{start:.1f}" y1="{middle}" x2="{end:.1f}" y2="{middle}"/>'
            x = max(x, end)
        yield _text(x + 8, middle + 4.5, f"{_figure(bar.length)} {self.unit}")


def _text(x: float, y: float, text: str, kind: str = "", *, end: bool = False) -> str:
    attributes = f' class="{kind}"' if kind else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}{anchor}>{escape(text)}</text>'


def _figure(length: float) -> str:
    """Three digits, as the tables of docs/benchmarks.md have them."""
    return f"{length:.3g}"
