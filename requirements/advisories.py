"""Audit of the locks without a network: compares their versions with an export of advisories, as osv.dev gives it for
PyPI.

``python requirements/advisories.py EXPORT.zip LOCK ...`` prints each version that an advisory is about, and exits with
1 if there is one, and with 2 if the export is none. The format is https://ossf.github.io/osv-schema: an advisory lists
the versions that it is about, or ranges of them.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lock import entries, normal
from packaging.version import InvalidVersion, Version


def affected(advisory: Mapping[str, Any], name: str, version: str) -> bool:
    """Whether an advisory is about a version of a project."""
    if "withdrawn" in advisory:
        return False
    for each in advisory.get("affected", ()):
        package = each.get("package", {})
        if package.get("ecosystem") != "PyPI" or normal(package.get("name", "")) != name:
            continue
        if version in each.get("versions", ()) or any(_within(found["events"], version) for found in _ranges(each)):
            return True
    return False


def _ranges(each: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (found for found in each.get("ranges", ()) if found.get("type") == "ECOSYSTEM")


def _within(events: Iterable[Mapping[str, str]], version: str) -> bool:
    """Whether a version lies behind an event that brings a weakness in, and before one that ends it."""
    inside = False
    for event in events:
        (kind, at), *_ = event.items()
        try:
            reached = at == "0" or Version(version) >= Version(at)
            beyond = kind == "last_affected" and Version(version) > Version(at)
        except InvalidVersion:
            continue
        if kind == "introduced" and reached:
            inside = True
        elif (kind == "fixed" and reached) or beyond:
            inside = False
    return inside


def main(export: str, *locks: str) -> int:
    """Audit locks."""
    pins = {name: version for lock in locks for name, version, _ in entries(Path(lock).read_text())}
    found = count = 0
    try:
        with zipfile.ZipFile(export) as archive:
            for member in archive.namelist():
                advisory = json.loads(archive.read(member))
                count += 1
                names = {normal(each.get("package", {}).get("name", "")) for each in advisory.get("affected", ())}
                for name in sorted(names & pins.keys()):
                    if affected(advisory, name, pins[name]):
                        found += 1
                        print(f"{name}=={pins[name]}: {advisory['id']} {advisory.get('summary', '')}".rstrip())
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        print(f"{export} is no export of advisories: {error}", file=sys.stderr)
        return 2
    print(f"{len(pins)} versions, {count} advisories: {found} known weaknesses")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
