"""View of two versions of a model side by side: facts, metadata, and the tensors that differ by their digests. Pure.

The comparison does not read weights. Tensors whose stored bytes have equal digests are equal. All others have changed;
``weighbridge diff`` measures by how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weighbridge._comparing.differences import layer_of
from weighbridge._core.metadata import by_trainer
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import readable_count
from weighbridge._core.text.sizes import readable_size
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.side_by_side.contents import Contents, TensorFacts, in_order
from weighbridge_service.api.http.pages.side_by_side.metadata_columns import Cell, cell_of, is_number

LAYERS = 200
"""Maximum number of layers on a page."""
NAMES = 50
"""Maximum number of tensors that are named for each kind of difference."""


@dataclass(frozen=True, slots=True)
class SideOfPage:
    """A version with its contents, and the refs that name it."""

    version: Version
    contents: Contents
    refs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of both versions, and the change if it is a number."""

    name: Cell
    before: Cell
    after: Cell
    change: str
    differs: bool


@dataclass(frozen=True, slots=True)
class Named:
    """Tensors that differ in one way: their number, and the names of the first."""

    kind: str
    count: int
    names: tuple[str, ...]

    @property
    def more(self) -> int:
        """Number of tensors that are not named."""
        return self.count - len(self.names)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Tensors of a layer with equal dtype and shape in both versions: their number, the number of changed ones, and the
    size of these as text.
    """

    layer: str
    tensors: int
    changed: int
    nbytes: str


@dataclass(frozen=True, slots=True)
class CompareView:
    """Two versions.

    Attributes:
        model: name of the model.
        before, after: numbers of the versions.
        facts: facts of both versions, such as step and size.
        metadata: metadata of both versions.
        known: whether the tensors of both versions are known.
        equal, changed, unknown: of the tensors with equal dtype and shape in both versions, the number of those that
            are equal, those that have changed, and those without a digest in one version (digests are known once a
            version is durable).
        changed_bytes: size of the changed tensors, as text.
        layers: layers with changed tensors, in the order of their numbers.
        more_layers: number of further layers with changed tensors.
        others: tensors that only one version has, and tensors whose dtype or shape differs.
    """

    model: str
    before: int
    after: int
    facts: tuple[Row, ...]
    metadata: tuple[Row, ...]
    known: bool
    equal: int
    changed: int
    unknown: int
    changed_bytes: str
    layers: tuple[LayerRow, ...]
    more_layers: int
    others: tuple[Named, ...]


def compare_view(before: SideOfPage, after: SideOfPage) -> CompareView:
    """Two versions of a model side by side."""
    old = {each.name: each for each in before.contents.tensors}
    new = {each.name: each for each in after.contents.tensors}
    both = [(each, new[name]) for name, each in old.items() if name in new]
    alike = [(a, b) for a, b in both if (a.dtype, a.shape) == (b.dtype, b.shape)]
    digests = [(a, b) for a, b in alike if a.xxh3_128 and b.xxh3_128]
    changed = [b for a, b in digests if a.xxh3_128 != b.xxh3_128]
    layers = _layers([b for _, b in alike], {each.name for each in changed})
    others = (
        _named("only in the first", old.keys() - new.keys()),
        _named("only in the second", new.keys() - old.keys()),
        _named("different dtype or shape", (a.name for a, b in both if (a.dtype, a.shape) != (b.dtype, b.shape))),
    )
    return CompareView(
        model=before.version.model,
        before=before.version.number,
        after=after.version.number,
        facts=_facts(before, after),
        metadata=_metadata(before.version, after.version),
        known=bool(old and new),
        equal=len(digests) - len(changed),
        changed=len(changed),
        unknown=len(alike) - len(digests),
        changed_bytes=readable_size(sum(each.nbytes for each in changed)),
        layers=layers[:LAYERS],
        more_layers=max(0, len(layers) - LAYERS),
        others=tuple(each for each in others if each.count),
    )


def _facts(before: SideOfPage, after: SideOfPage) -> tuple[Row, ...]:
    a, b = before.version, after.version
    texts = (
        ("state", a.state.value, b.state.value),
        ("refs", ", ".join(before.refs), ", ".join(after.refs)),
        ("run", a.run, b.run),
        ("opened", _moment(a.create_time_ms), _moment(b.create_time_ms)),
        ("durable", _moment(a.durable_time_ms), _moment(b.durable_time_ms)),
        ("held", ", ".join(a.held), ", ".join(b.held)),
        ("size", _size(a.tensor_bytes), _size(b.tensor_bytes)),
        ("files", _files(before), _files(after)),
    )
    numbers = (
        ("step", a.step, b.step),
        ("ranks", a.ranks, b.ranks),
        ("tensors", len(before.contents.tensors), len(after.contents.tensors)),
        ("NaN or infinite", a.nonfinite_elements, b.nonfinite_elements),
    )
    return (
        *(_row(name, one, other) for name, one, other in numbers),
        *(_row(name, one or words.NONE, other or words.NONE) for name, one, other in texts),
    )


def _metadata(before: Version, after: Version) -> tuple[Row, ...]:
    old, new = by_trainer(before.metadata), by_trainer(after.metadata)
    return tuple(_row(key, old.get(key, words.NONE), new.get(key, words.NONE)) for key in sorted({*old, *new}))


def _row(name: str, before: str | float, after: str | float) -> Row:
    change = ""
    if is_number(before) and is_number(after) and not isinstance(before, str) and not isinstance(after, str):
        step = after - before
        change = f"+{cell_of(step).text}" if step > 0 else cell_of(step).text if step < 0 else ""
    return Row(cell_of(name), cell_of(before), cell_of(after), change, before != after)


def _layers(alike: Sequence[TensorFacts], changed: set[str]) -> tuple[LayerRow, ...]:
    found: dict[str, list[TensorFacts]] = {}
    for each in alike:
        found.setdefault(layer_of(each.name), []).append(each)
    rows = []
    for layer in sorted(found, key=in_order):
        moved = [each for each in found[layer] if each.name in changed]
        if moved:
            size = readable_size(sum(each.nbytes for each in moved))
            rows.append(LayerRow(layer, len(found[layer]), len(moved), size))
    return tuple(rows)


def _named(kind: str, names: Iterable[str]) -> Named:
    found = sorted(names, key=in_order)
    return Named(kind, len(found), tuple(found[:NAMES]))


def _moment(unix_ms: int) -> str:
    return words.moment(unix_ms) if unix_ms else ""


def _size(nbytes: int) -> str:
    return readable_size(nbytes) if nbytes else ""


def _files(side: SideOfPage) -> str:
    files = side.contents.files
    if not files:
        return ""
    return f"{readable_count(len(files))}, {readable_size(sum(each.size for each in files))}"
