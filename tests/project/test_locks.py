"""Do the locks list, by hash, all that is installed, and in the versions that are tested together?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
sys.path.insert(0, str(FOLDER))

from advisories import affected  # noqa: E402
from lock import BASES, EXCLUDED, entries, normal  # noqa: E402

LOCKS = {extra: list(entries((FOLDER / f"{extra}.txt").read_text())) for extra in BASES}
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def test_locks_and_constraints_agree() -> None:
    pins = {normal(name): version for name, version in PINS.items()}
    locked = [(name, version) for found in LOCKS.values() for name, version, _ in found]
    assert {name for name, _ in locked} == pins.keys() - set(EXCLUDED)
    assert dict(locked) == {n: v for n, v in pins.items() if n not in EXCLUDED}


def test_what_is_locked_has_hashes_and_names_no_place() -> None:
    for extra, found in LOCKS.items():
        for name, _, text in found:
            assert re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text), f"{name} of {extra}"
        assert "://" not in (FOLDER / f"{extra}.txt").read_text()


def test_no_lock_repeats_what_it_goes_with() -> None:
    for extra, bases in BASES.items():
        own = {name for name, _, _ in LOCKS[extra]}
        assert not own & {name for base in bases for name, _, _ in LOCKS[base]}, extra


def test_all_that_is_needed_here_is_locked_as_it_is_installed() -> None:
    """What the extra `dev` needs, and what that needs, as far as it goes without torch: its needs are those of its build."""
    locked = {name: version for extra in ("service", "tracing", "dev") for name, version, _ in LOCKS[extra]}
    waiting, seen = [("weighbridge", frozenset({"dev"}))], set()
    while waiting:
        project, extras = waiting.pop()
        if (project, extras) in seen or project in EXCLUDED:
            continue
        seen.add((project, extras))
        if project != "weighbridge":
            assert locked.get(project) == metadata.version(project), project
        for line in metadata.requires(project) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in (*extras, "")):
                waiting.append((normal(needed.name), frozenset(needed.extras)))
    assert len({project for project, _ in seen}) > 50


def test_the_image_and_make_take_the_locks() -> None:
    assert (
        "--require-hashes --requirement requirements/service.txt" in (ROOT / "deploy/Dockerfile").read_text()
    )
    assert "--no-deps --require-hashes" in (ROOT / "Makefile").read_text()


def advisory(**affected_by: object) -> dict[str, object]:
    package = {"ecosystem": "PyPI", "name": "Jinja2"}
    return {"id": "GHSA-x", "affected": [{"package": package, **affected_by}]}


@pytest.mark.parametrize(
    ("found", "version", "is_affected"),
    [
        (advisory(versions=["3.1.2", "3.1.3"]), "3.1.2", True),
        (advisory(versions=["3.1.2"]), "3.1.6", False),
        (advisory(ranges=[{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.6"}]}]), "3.1.5", True),
        (advisory(ranges=[{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.6"}]}]), "3.1.6", False),
        (advisory(ranges=[{"type": "ECOSYSTEM", "events": [{"introduced": "3"}, {"last_affected": "3.1"}]}]), "3.1", True),
        (advisory(ranges=[{"type": "ECOSYSTEM", "events": [{"introduced": "3"}, {"last_affected": "3.1"}]}]), "3.1.1", False),
        (advisory(ranges=[{"type": "ECOSYSTEM", "events": [{"introduced": "3.2"}]}]), "3.1.6", False),
        ({**advisory(versions=["3.1.6"]), "withdrawn": "2026-01-01T00:00:00Z"}, "3.1.6", False),
    ],
)  # fmt: skip
def test_an_advisory_is_about_the_versions_that_it_lists(
    found: dict[str, object], version: str, is_affected: bool
) -> None:
    assert affected(found, "jinja2", version) is is_affected


@pytest.mark.process
def test_an_audit_without_a_network_names_what_is_known_to_be_weak(tmp_path: Path) -> None:
    version = {name: version for name, version, _ in LOCKS["service"]}["jinja2"]
    exports = {"weak.zip": advisory(versions=[version]), "sound.zip": advisory(versions=["0.1"])}
    for name, found in exports.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("GHSA-x.json", json.dumps(found))

    def audit(export: str) -> subprocess.CompletedProcess[str]:
        line = [
            sys.executable,
            str(FOLDER / "advisories.py"),
            str(tmp_path / export),
            str(FOLDER / "service.txt"),
        ]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    weak, sound, none = audit("weak.zip"), audit("sound.zip"), audit("none.zip")
    assert (weak.returncode, sound.returncode, none.returncode) == (1, 0, 2)
    assert f"jinja2=={version}: GHSA-x" in weak.stdout
