"""Metadata of versions: named scalars that a trainer gives them, their limits, and the conditions by which versions are
listed.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from weighbridge._core.json_values import JsonValue
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument

__all__ = ["BaseVersion", "Metadata"]

MetadataValue: TypeAlias = str | int | float | bool
Metadata: TypeAlias = Mapping[str, MetadataValue]
"""Strings, finite numbers and booleans that a trainer attaches to the version that it pushes, by name."""

OTHER_WRITER = "weighbridge.other_writer"
"""Key under which the service names a version that another job has pushed since the previous version of this job."""
BASE, BASE_DIGEST = "weighbridge.base", "weighbridge.base_digest"
"""Keys under which the service names the base of an adapter's version, such as ``acme/smol@17``, and the digest in the
base's manifest. In an opening, `BASE` is the base that a rank names, by a number or a ref."""
ADAPTER_DIGEST = "weighbridge.adapter"
"""Key in an opening for the digest of the adapter that a rank pushes (`weighbridge._core.layouts.adapter_digest`). The
service compares the digest and does not store it.
"""
OF_OPENING = frozenset((BASE, BASE_DIGEST, ADAPTER_DIGEST))
"""Names in the metadata of an opening that are not metadata of the version."""
_OF_SERVICE = frozenset((OTHER_WRITER, *OF_OPENING))
MAX_KEYS = 32
MAX_BYTES = 4096
"""Maximum number of bytes of the metadata of a version, as JSON."""
_MAX_INTEGER = 2**63 - 1
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
_CONDITION = re.compile(r"\s*([A-Za-z0-9_./-]+)\s*(>=|<=|!=|==|=|>|<)\s*(.*?)\s*", re.DOTALL)
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def checked_metadata(metadata: Mapping[str, object]) -> dict[str, MetadataValue]:
    """Return metadata in the form that is stored: strings, 64-bit integers, finite numbers and booleans. A numpy scalar
    becomes its Python value.

    Raises:
        InvalidArgument: the metadata is not a mapping, a key or a value is invalid, or the metadata exceeds `MAX_KEYS`
            or `MAX_BYTES`.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(
            f"the metadata is a {type(metadata).__name__}", fix="pass a dict, such as {'reward': 0.71}"
        )
    if len(metadata) > MAX_KEYS:
        raise InvalidArgument(f"the metadata has {len(metadata)} entries, more than {MAX_KEYS}")
    found = {key: _checked_value(key, value) for key, value in metadata.items()}
    nbytes = len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode())
    if nbytes > MAX_BYTES:
        raise InvalidArgument(
            f"the metadata has {nbytes} bytes as JSON, more than {MAX_BYTES}",
            fix="store long values elsewhere, and their location here",
        )
    return found


def by_trainer(metadata: Metadata) -> Metadata:
    """Return metadata without the entries that the service adds."""
    return {key: value for key, value in metadata.items() if key not in _OF_SERVICE}


def check_base(base: object) -> None:
    """Raise InvalidArgument if a base is not a string."""
    if not isinstance(base, str):
        raise InvalidArgument(
            f"the base is {shown(base)}, not a string", fix="name a version of a model, like acme/smol@17"
        )


@dataclass(frozen=True, slots=True)
class BaseVersion(JsonValue):
    """The base of a version of an adapter."""

    model: str
    """`namespace/name`."""
    number: int
    """Number of the base version."""
    digest: str = ""
    """Digest in the base version's manifest."""

    def __str__(self) -> str:
        return f"{self.model}@{self.number}"

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """The entries of an adapter version's metadata that name this base."""
        return {BASE: str(self), BASE_DIGEST: self.digest}

    @staticmethod
    def of(metadata: Metadata) -> BaseVersion | None:
        """Return the base in the metadata of a stored or open version; None if the version does not have one."""
        model, _, number = str(metadata.get(BASE, "")).partition("@")
        if not model or not (number.isascii() and number.isdecimal() and len(number) <= 12):
            return None
        return BaseVersion(model, int(number), str(metadata.get(BASE_DIGEST, "")))


def with_other_writer(metadata: Metadata, other: str) -> Metadata:
    """Return metadata with the entry `OTHER_WRITER`, if there is another writer and the entry fits within the
    limits.
    """
    if not other:
        return metadata
    try:
        return checked_metadata({OTHER_WRITER: other, **metadata})
    except InvalidArgument:  # the metadata is already as large as it may be
        return metadata


def _checked_value(key: object, value: object) -> MetadataValue:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidArgument(
            f"metadata has the key {str(key)[:80]!r}", fix="use up to 64 letters, digits, and _ . / -"
        )
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]  # bool_, int64 and float32 are not Python types
    match value:
        case bool():
            return value
        case int() if abs(value) <= _MAX_INTEGER:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case str() if value.isprintable():
            return str(value)
    raise InvalidArgument(
        f"the metadata {key} is {str(value)[:80]!r} ({type(value).__name__})",
        fix="use a printable text, a finite number, an integer of 64 bits, or a bool; of a tensor its item()",
    )


def parse_value(text: str) -> MetadataValue:
    """Parse a value that a user typed: a JSON number, ``true`` or ``false`` in upper or lower case, or a JSON string in
    quotes. Everything else is a string.

    Raises:
        InvalidArgument: the value is a number that is not finite.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{text} is not a finite number", fix="leave it out, or write it as a text")
    return value if isinstance(value, str | int | float) else text


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one value of a version's metadata.

    Attributes:
        key: key of the value.
        comparison: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``.
        value: the value to compare with.
    """

    key: str
    comparison: str
    value: MetadataValue

    @staticmethod
    def parse(text: str) -> Condition:
        """Parse a text such as ``reward>=0.7``. Raises InvalidArgument."""
        found = _CONDITION.fullmatch(text) if len(text) <= MAX_BYTES else None
        if found is None or not _KEY.fullmatch(found[1]):
            raise InvalidArgument(
                f"{text[:80]!r} compares nothing", fix="write it like reward>=0.7, with = != < <= > or >="
            )
        return Condition(found[1], "=" if found[2] == "==" else found[2], parse_value(found[3]))

    def holds(self, metadata: Metadata) -> bool:
        """Whether a version's metadata meets the condition.

        A condition on a missing key is false. Values of different kinds are unequal, and neither is less or greater. A
        string that parses as a number or boolean counts as one in a comparison with a value that is not a string.
        """
        if self.key not in metadata:
            return False
        found = metadata[self.key]
        if isinstance(found, str) and not isinstance(self.value, str):
            found = _read(found)
        if _kind(found) is not _kind(self.value):
            return self.comparison == "!="
        if isinstance(found, bool) and self.comparison not in ("=", "!="):
            return False
        return _COMPARISONS[self.comparison](found, self.value)


def conditions(texts: Sequence[str]) -> list[Condition]:
    """Parse several texts such as ``reward>=0.7``. Raises InvalidArgument."""
    if len(texts) > MAX_KEYS:
        raise InvalidArgument(f"{len(texts)} comparisons are more than {MAX_KEYS}")
    return [Condition.parse(text) for text in texts]


def all_hold(conditions: Iterable[Condition], metadata: Metadata) -> bool:
    """Whether a version's metadata meets all conditions."""
    return all(condition.holds(metadata) for condition in conditions)


def _read(text: str) -> MetadataValue:
    try:
        return parse_value(text)
    except InvalidArgument:  # NaN or infinite: nothing is less or greater
        return text


def _kind(value: MetadataValue) -> type:
    return float if type(value) is int else type(value)
