"""Screen of an overview: tables that fit the width of a terminal, most important first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighbridge._cli.showing.overview import MemoryUse, Overview, Past, Push, PushingRank
from weighbridge._core.engines.facts import (
    ENGINE_FAILING,
    ENGINE_UPDATING,
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_STALE,
    Engine,
)
from weighbridge._core.reports.rank_progress import RankStage
from weighbridge._core.resources import Model, VersionState, refs_text
from weighbridge._core.text.counts import counted, readable_count
from weighbridge._core.text.durations import readable_age, readable_duration
from weighbridge._core.text.plain import plain
from weighbridge._core.text.sizes import readable_part, readable_rate, readable_size

T = TypeVar("T")
_NARROW, _MEDIUM, _WIDE_LINE = 72, 110, 140
"""Terminal width below which tables omit the least important columns, and a push is shown on several lines."""
_BAR = 24
_SHOWN_RANKS = (RankStage.MISSING, RankStage.DECLARED, RankStage.COPYING, RankStage.SENDING)
"""Number of slowest ranks that are shown, slowest first."""
_MOST_RANKS = 8
_MOST_PUSHES = 12
_MOST_ROWS = 200
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


def draw(seen: Overview, width: int, most_rows: int = _MOST_ROWS) -> RenderableType:
    """Draw an overview.

    Args:
        seen: the overview.
        width: columns of the terminal.
        most_rows: maximum number of engines, and of versions and models, that are listed.
    """
    parts = [
        _head(seen, width),
        *_pushes(seen, width),
        *_titled("ENGINES", _engines(seen.engines[:most_rows], width), len(seen.engines), most_rows),
        *_titled(
            "VERSIONS",
            _versions(seen.versions[:most_rows], seen.time_ms, width),
            len(seen.versions),
            most_rows,
        ),
        *_titled("MODELS", _models(seen.models[:most_rows], width), len(seen.models), most_rows),
    ]
    if not seen.models:
        parts.append(Text("no models yet: weighbridge import HF_DIR acme/smol", style="dim"))
    return Group(*parts)


def _head(seen: Overview, width: int) -> RenderableType:
    time = datetime.fromtimestamp(seen.time_ms / 1000).astimezone().strftime("%H:%M:%S")
    head = Text.assemble(("weighbridge top", "bold"), "  ", plain(seen.server), "  ", time)
    lines = [head]
    if seen.away_s:
        lines.append(
            Text(
                f"no answer for {readable_duration(seen.away_s, rough=True)}: {plain(seen.away_reason)}",
                style="bold red",
            )
        )
    if seen.memory is not None:
        lines.append(Text(plain(memory_text(seen.memory)), overflow="ellipsis", no_wrap=width >= _NARROW))
    return Group(*lines)


def memory_text(use: MemoryUse) -> str:
    """Memory use of a service, in one line."""
    text = f"memory {readable_size(use.images)} of {readable_size(use.budget)}"
    if use.disk:
        text += f", spilled to disk {readable_size(use.disk)}"
    flying = ", ".join(f"{readable_size(count)} {way}" for way, count in use.in_flight.items() if count)
    return f"{text}; in flight {flying or '0 B'}, of {readable_size(use.byte_budget)}"


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
    """A push: its progress, missing ranks, and slowest ranks."""
    version = push.version
    filled = push.percent * _BAR // 100
    age = readable_age(version.create_time_ms, now_ms)
    left = "" if push.left_s is None else f", {readable_duration(push.left_s, rough=True)} left"
    parts = (
        Text.assemble((plain(f"{version.model}@{version.number}"), "bold"), f"  step {version.step}"),
        Text.assemble(
            ("█" * filled, "cyan"),
            ("░" * (_BAR - filled), "dim"),
            f" {push.percent:3}%  {readable_part(version.received_bytes, version.tensor_bytes)}",
        ),
        Text(
            f"{_rate_text(push.rate)}  {version.sealed_ranks} of {counted(version.ranks, 'rank')} done, for {age}{left}"
        ),
    )
    if width >= _WIDE_LINE:
        yield Text("  ").join(parts)
    else:
        yield parts[0]
        yield from (Text.assemble("  ", part) for part in parts[1:])
    for what in version.waits_for:
        yield Text(f"  waits for {plain(what)}", style="yellow")
    if version.error:
        yield Text(f"  {plain(version.error)}", style="red")
    behind = sorted(
        (each for each in push.ranks if each.progress.stage in _SHOWN_RANKS),
        key=lambda each: (_SHOWN_RANKS.index(each.progress.stage), each.progress.percent),
    )
    for rank in behind[:_MOST_RANKS]:
        yield Text(f"  rank {rank.progress.rank:<5} {_rank_text(rank)}")
    if len(behind) > _MOST_RANKS:
        yield Text(f"  and {counted(len(behind) - _MOST_RANKS, 'rank')} that are further along", style="dim")


def _rank_text(rank: PushingRank) -> str:
    progress = rank.progress
    if progress.stage is not RankStage.SENDING:
        return progress.text
    return f"{progress.percent:3}%  {progress.text}  {_rate_text(rank.rate)}"


def _engines(engines: Iterable[Engine], width: int) -> Table:
    columns = _chosen(width, ("ENGINE", "MODEL", "SERVES", "STANDING"), ("STATE",), ("REF", "NOTE"))
    return _table(columns, (_chosen(width, *_engine_cells(each)) for each in engines))


def _engine_cells(engine: Engine) -> tuple[Sequence[Text], ...]:
    colour = {ENGINE_FAILING: "red", ENGINE_UPDATING: "cyan"}.get(engine.state, "")
    return (
        (
            Text(plain(engine.label)),
            Text(plain(engine.model)),
            Text(str(engine.version or "-")),
            Text(plain(engine.standing_text), style=_STANDINGS.get(engine.standing, "")),
        ),
        (Text(plain(engine.state_text), style=colour),),
        (
            Text(plain(engine.ref_text or "-")),
            Text(plain(engine.error)),
        ),
    )


def _versions(versions: Iterable[Past], now_ms: int, width: int) -> Table:
    columns = _chosen(width, ("VERSION", "STATE", "SIZE", "READY"), ("DURABLE", "AGE", "REFS"), ("STEP", "NOTE"))
    return _table(columns, (_chosen(width, *_version_cells(each, now_ms)) for each in versions))


def _version_cells(past: Past, now_ms: int) -> tuple[Sequence[Text], ...]:
    version = past.version
    note = version.error or (f"held: {', '.join(version.held)}" if version.held else "")
    return (
        (
            Text(plain(f"{version.model}@{version.number}")),
            Text(version.state.value, style=_COLOURS.get(version.state, "")),
            Text(readable_size(version.tensor_bytes)),
            Text(_took_text(past.ready_s)),
        ),
        (
            Text(_took_text(past.durable_s)),
            Text(readable_age(version.create_time_ms, now_ms)),
            Text(plain(", ".join(past.refs) or "-")),
        ),
        (Text(str(version.step)), Text(plain(note))),
    )


def _models(models: Iterable[Model], width: int) -> Table:
    columns = _chosen(width, ("MODEL", "REFS"), ("SIZE",), ("TYPE", "DTYPE"))
    return _table(columns, (_chosen(width, *_model_cells(each)) for each in models))


def _model_cells(model: Model) -> tuple[Sequence[Text], ...]:
    return (
        (Text(plain(model.name)), Text(plain(refs_text(model.refs)))),
        (Text(readable_size(model.tensor_bytes)),),
        (Text(plain(model.model_type or "-")), Text(plain(model.dtype))),
    )


def _chosen(width: int, always: Sequence[T], medium: Sequence[T], wide: Sequence[T]) -> list[T]:
    """Columns that fit into the width."""
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


def _titled(title: str, table: Table, count: int, most: int) -> Iterator[RenderableType]:
    if count:
        yield Text(f"\n{title}", style="bold")
        yield table
    if count > most:
        yield Text(f"and {readable_count(count - most)} more", style="dim")


def _rate_text(rate: float | None) -> str:
    return "-" if rate is None else readable_rate(rate)


def _took_text(seconds: float | None) -> str:
    return "-" if seconds is None else readable_duration(seconds)
