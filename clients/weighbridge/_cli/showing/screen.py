"""Screen of an overview: tables that fit the width of a terminal, the most important first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighbridge._cli.showing.overview import MemoryUse, Overview, Past, Push, RankProgress
from weighbridge._core.engines.facts import (
    ENGINE_FAILING,
    ENGINE_UPDATING,
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_STALE,
    Engine,
)
from weighbridge._core.resources import Model, VersionState
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size

T = TypeVar("T")
_NARROW, _MEDIUM, _WIDE_LINE = 72, 110, 140
"""Columns below which tables leave out what is least needed, and a push takes several lines."""
_BAR = 24
_SLOWEST = 8
"""How many ranks of a push are shown: those of which the smallest part has come."""
_MOST_PUSHES = 12
_MOST_VERSIONS = 200
_COLOURS = {
    VersionState.READY: "cyan",
    VersionState.VERIFIED: "cyan",
    VersionState.DURABLE: "green",
    VersionState.FAILED: "red",
    VersionState.ABORTED: "yellow",
    VersionState.RETIRED: "dim",
}
_STANDINGS = {
    STANDING_CURRENT: "green",
    STANDING_BEHIND: "yellow",
    STANDING_STALE: "yellow",
    STANDING_GONE: "red",
}


def draw(seen: Overview, width: int, most_versions: int = _MOST_VERSIONS) -> RenderableType:
    """Draw an overview.

    Args:
        seen: what is drawn.
        width: columns of the terminal.
        most_versions: how many versions are listed.
    """
    parts = [
        _head(seen, width),
        *_pushes(seen, width),
        *_titled("ENGINES", _engines(seen, width), seen.engines),
        *_titled("VERSIONS", _versions(seen, width, most_versions), seen.versions),
        *_titled("MODELS", _models(seen, width), seen.models),
    ]
    if not seen.models:
        parts.append(Text("no models yet: weighbridge import HF_DIR acme/smol", style="dim"))
    return Group(*parts)


def _head(seen: Overview, width: int) -> RenderableType:
    time = datetime.fromtimestamp(seen.time_ms / 1000).astimezone().strftime("%H:%M:%S")
    head = Text.assemble(("weighbridge top", "bold"), "  ", _clean(seen.server), "  ", time)
    lines = [head]
    if seen.away_s:
        lines.append(
            Text(f"no answer for {seconds_text(seen.away_s)}: {_clean(seen.away_reason)}", style="bold red")
        )
    if seen.memory is not None:
        lines.append(Text(memory_text(seen.memory), overflow="ellipsis", no_wrap=width >= _NARROW))
    return Group(*lines)


def memory_text(use: MemoryUse) -> str:
    """How a service stands with memory, in a line."""
    text = f"memory {readable_size(use.images)} of {readable_size(use.budget)}"
    if use.disk:
        text += f", spilled to disk {readable_size(use.disk)}"
    if use.byte_budget:
        flying = ", ".join(f"{readable_size(count)} {way}" for way, count in use.in_flight.items() if count)
        text += f"; in flight {flying or '0 B'}, of {readable_size(use.byte_budget)}"
    return text


def _pushes(seen: Overview, width: int) -> Iterator[RenderableType]:
    if not seen.pushes:
        return
    yield Text("\nRECEIVING", style="bold")
    for push in seen.pushes[:_MOST_PUSHES]:
        yield from push_lines(push, seen.time_ms, width)
    more = len(seen.pushes) - _MOST_PUSHES
    if more > 0:
        yield Text(f"and {counted(more, 'other push', 'other pushes')}", style="dim")


def push_lines(push: Push, now_ms: int, width: int) -> Iterator[Text]:
    """A push: how far it is, who is missing, and its slowest ranks."""
    version = push.version
    filled = round(push.fraction * _BAR)
    age = seconds_text(max(now_ms - version.create_time_ms, 0) / 1000)
    left = "" if push.left_s is None else f", {seconds_text(push.left_s)} left"
    parts = (
        Text.assemble((f"{version.model}@{version.number}", "bold"), f"  step {version.step}"),
        Text.assemble(
            ("█" * filled, "cyan"),
            ("░" * (_BAR - filled), "dim"),
            f" {push.fraction:4.0%}  {readable_size(version.received_bytes)} of {readable_size(version.tensor_bytes)}",
        ),
        Text(
            f"{rate_text(push.rate)}  {version.sealed_ranks} of {counted(version.ranks, 'rank')} done, for {age}{left}"
        ),
    )
    if width >= _WIDE_LINE:
        yield Text("  ").join(parts)
    else:
        yield parts[0]
        yield from (Text.assemble("  ", part) for part in parts[1:])
    for what in version.waits_for:
        yield Text(f"  waits for {_clean(what)}", style="yellow")
    if version.error:
        yield Text(f"  {_clean(version.error)}", style="red")
    behind = sorted((each for each in push.ranks if not each.state.sealed), key=_part)
    for rank in behind[:_SLOWEST]:
        state = rank.state
        yield Text(
            f"  rank {state.rank:<5}{_part(rank):4.0%}  {readable_size(state.received)} of {readable_size(state.total)}"
            f"  {rate_text(rank.rate)}"
        )
    if len(behind) > _SLOWEST:
        yield Text(f"  and {counted(len(behind) - _SLOWEST, 'rank')} that are further", style="dim")


def _part(rank: RankProgress) -> float:
    return rank.state.received / rank.state.total if rank.state.total else 0.0


def _engines(seen: Overview, width: int) -> Table:
    columns = _chosen(width, ("ENGINE", "MODEL", "SERVES", "STANDING"), ("STATE",), ("REF", "NOTE"))
    return _table(columns, (_chosen(width, *_engine_cells(each)) for each in seen.engines))


def _engine_cells(engine: Engine) -> tuple[Sequence[Text], ...]:
    state = f"{engine.state} to {engine.target}" if engine.target else engine.state
    standing = engine.standing
    if standing == STANDING_BEHIND:
        standing = f"{counted(engine.behind, 'version')} behind" if engine.behind else standing
    colour = {ENGINE_FAILING: "red", ENGINE_UPDATING: "cyan"}.get(engine.state, "")
    return (
        (
            Text(_clean(engine.label)),
            Text(engine.model),
            Text(str(engine.version or "-")),
            Text(standing, style=_STANDINGS.get(engine.standing, "")),
        ),
        (Text(state, style=colour),),
        (Text(f"{engine.ref}={engine.named or '?'}" if engine.ref else "-"), Text(_clean(engine.error))),
    )


def _versions(seen: Overview, width: int, most: int) -> Table:
    columns = _chosen(
        width, ("VERSION", "STATE", "SIZE", "READY"), ("DURABLE", "AGE", "REFS"), ("STEP", "NOTE")
    )
    rows = (_chosen(width, *_version_cells(each, seen.time_ms)) for each in islice(seen.versions, most))
    return _table(columns, rows)


def _version_cells(past: Past, now_ms: int) -> tuple[Sequence[Text], ...]:
    version = past.version
    note = version.error or (f"held: {', '.join(version.held)}" if version.held else "")
    return (
        (
            Text(f"{version.model}@{version.number}"),
            Text(version.state.value, style=_COLOURS.get(version.state, "")),
            Text(readable_size(version.tensor_bytes)),
            Text(took_text(past.ready_s)),
        ),
        (
            Text(took_text(past.durable_s)),
            Text(seconds_text(max(now_ms - version.create_time_ms, 0) / 1000)),
            Text(", ".join(past.refs) or "-"),
        ),
        (Text(str(version.step)), Text(_clean(note))),
    )


def _models(seen: Overview, width: int) -> Table:
    columns = _chosen(width, ("MODEL", "REFS"), ("SIZE",), ("TYPE", "DTYPE"))
    return _table(columns, (_chosen(width, *_model_cells(each)) for each in seen.models))


def _model_cells(model: Model) -> tuple[Sequence[Text], ...]:
    refs = ", ".join(f"{ref}={number}" for ref, number in sorted(model.refs.items()))
    return (
        (Text(model.name), Text(refs or "-")),
        (Text(readable_size(model.tensor_bytes)),),
        (Text(model.model_type or "-"), Text(model.dtype)),
    )


def _chosen(width: int, always: Sequence[T], medium: Sequence[T], wide: Sequence[T]) -> list[T]:
    """What there is room for."""
    return [
        *always,
        *(medium if width >= _NARROW else ()),
        *(wide if width >= _MEDIUM else ()),
    ]


def _table(columns: Iterable[str], rows: Iterable[Sequence[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _titled(title: str, table: Table, content: Sequence[object]) -> Iterator[RenderableType]:
    return chain((Text(f"\n{title}", style="bold"), table)) if content else iter(())


def rate_text(rate: float | None) -> str:
    """Bytes a second, for people; ``-`` if that is not known."""
    return "-" if rate is None else f"{readable_size(round(rate))}/s"


def took_text(seconds: float | None) -> str:
    """How long something took; ``-`` if that is not known."""
    return "-" if seconds is None else seconds_text(seconds)


def seconds_text(seconds: float) -> str:
    """A time for people: ``0.3 s``, ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for most, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _clean(text: str) -> str:
    """What others have written, without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text)
