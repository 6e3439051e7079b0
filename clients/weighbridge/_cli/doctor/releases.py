"""Releases of other packages that the SDK, its plug-ins and the service work with, and what is found of those that are installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.checks import Check, CheckStatus

Release: TypeAlias = tuple[int, ...]
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Supported:
    """Which releases of a package are supported.

    Attributes:
        oldest: the first one.
        newest: the last one that ran with this release of Weighbridge; a later one may work.
        without: releases between them with which the service does not work, by what their numbers begin with.
    """

    oldest: str
    newest: str
    without: tuple[str, ...] = ()


SUPPORTED: Mapping[str, Supported] = {
    "torch": Supported("2.6", "2.13"),
    "transformers": Supported("4.57", "5.23", ("5.0", "5.1", "5.2", "5.3", "5.4", "5.5")),
    "megatron-core": Supported("0.16", "0.16"),
    "mbridge": Supported("0.15.1", "0.15"),
    "vllm": Supported("0.24.0", "0.33"),
    "sglang": Supported("0.5.10", "0.5.23"),
    "grpcio": Supported("1.76", "1.76"),
    "protobuf": Supported("6.31.1", "6.33"),
}
"""By the name of the package. The bounds are those of pyproject.toml, constraints.txt and the releases of engines that tests run in: a test
compares."""


def check_release(package: str, installed: str) -> Check | None:
    """What is found of an installed package; None if it is one of no matter.

    Args:
        package: its name.
        installed: its version.
    """
    supported = SUPPORTED.get(package)
    if supported is None:
        return None
    name, found = f"version of {package}", release(installed)
    if found < release(supported.oldest):
        return Check(
            name,
            CheckStatus.FAIL,
            f"{installed} is older than {supported.oldest}, the first one that is supported",
            f"pip install '{package}>={supported.oldest}'",
        )
    if any(_begins(found, release(each)) for each in supported.without):
        return Check(
            name,
            CheckStatus.WARN,
            f"the service does not work with {installed}; engines and trainers do",
            f"where a service runs, pip install '{package}>={supported.oldest}', but none of {', '.join(supported.without)}",
        )
    newest = release(supported.newest)
    if found[: len(newest)] > newest:
        return Check(
            name,
            CheckStatus.WARN,
            f"{installed} is newer than {supported.newest}, the newest one that was tested",
            "if it does not work, install an older one, or a newer Weighbridge",
        )
    what = f"{installed}; supported from {supported.oldest} on, tested up to {supported.newest}"
    return Check(name, CheckStatus.OK, what)


def release(version: str) -> Release:
    """The numbers of a version, without what follows them: ``2.13.0+cpu`` is 2.13.0."""
    found = _NUMBERS.match(version)
    return tuple(int(each) for each in found[0].split(".")) if found else ()


def _begins(found: Release, with_: Release) -> bool:
    return found[: len(with_)] == with_
