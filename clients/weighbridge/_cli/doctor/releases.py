"""Releases of other packages: the oldest supported ones, those with known faults, and findings about installed ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.checks import Check

Release: TypeAlias = tuple[int, ...]
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Supported:
    """Range of supported releases of a package.

    It has no upper bound: a release that is newer than the tested ones is not a finding.

    Attributes:
        oldest: the oldest supported release.
        tested: the newest release with which this release of Weighbridge was tested.
    """

    oldest: str
    tested: str


@dataclass(frozen=True, slots=True)
class KnownFault:
    """Releases of a package that are known to break something.

    Attributes:
        package: its name.
        first: the first affected release.
        last: the last affected release, including all releases whose numbers begin with it.
        what: the fault; follows the version in the message.
        fix: as for a finding.
        source: evidence in this repository, for developers.
    """

    package: str
    first: str
    last: str
    what: str
    fix: str
    source: str

    def concerns(self, package: str, installed: str) -> bool:
        """Whether an installed release is affected."""
        found, last = release(installed), release(self.last)
        return package == self.package and found >= release(self.first) and found[: len(last)] <= last


SUPPORTED: Mapping[str, Supported] = {
    "torch": Supported("2.6", "2.13"),
    "transformers": Supported("4.57", "5.24"),
    "megatron-core": Supported("0.16", "0.16"),
    "mbridge": Supported("0.15.1", "0.15"),
    "vllm": Supported("0.24.0", "0.33"),
    "sglang": Supported("0.5.10", "0.5.23"),
    "grpcio": Supported("1.76", "1.85"),
    "protobuf": Supported("6.31.1", "7.36"),
}
"""Supported releases by the name of the package. The oldest are those of pyproject.toml and the oldest engines that
tests run in; the tested are the newest of constraints.txt, of those engines and of what `make test-newest` has
resolved. A test compares.
"""

KNOWN_FAULTS: Sequence[KnownFault] = (
    KnownFault(
        "transformers",
        "5.0",
        "5.5",
        "the service makes different weight maps with it than with other releases; engines and trainers work",
        "where a service runs, pip install 'transformers>=5.6,<6'",
        "docs/families.md",
    ),
    KnownFault(
        "sglang",
        "0.5.10",
        "0.5.11",
        "its server cannot start from the service, and only takes updates",
        "start it from a folder or from the Hub endpoint, or pip install 'sglang>=0.5.12'",
        "docs/sglang.md#sglang-0510",
    ),
)
"""The only table of known faults. pyproject.toml also excludes those of transformers."""


def check_release(package: str, installed: str) -> Check | None:
    """Check an installed package's release; None for a package that is not in `SUPPORTED`.

    Args:
        package: its name.
        installed: its version.
    """
    supported = SUPPORTED.get(package)
    if supported is None:
        return None
    name = f"version of {package}"
    if release(installed) < release(supported.oldest):
        return Check.fail(
            name,
            f"{installed} is older than {supported.oldest}, the first one that is supported",
            f"pip install '{package}>={supported.oldest}'",
        )
    for fault in KNOWN_FAULTS:
        if fault.concerns(package, installed):
            return Check.warn(name, f"{installed}: {fault.what}", fault.fix)
    what = f"{installed}; supported from {supported.oldest} on, tested up to {supported.tested}"
    return Check.ok(name, what)


def release(version: str) -> Release:
    """The numeric part of a version: ``2.13.0+cpu`` is 2.13.0."""
    found = _NUMBERS.match(version)
    return tuple(int(each) for each in found[0].split(".")) if found else ()
