"""Does doctor name each problem that its readings show, and the fix?"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from weighbridge._cli.doctor.checks import (
    CertificateReading,
    LaneReading,
    PortReading,
    SharedMemoryReading,
    check_certificate,
    check_huge_pages,
    check_lane,
    check_port,
    check_shared_memory,
    check_skew,
)
from weighbridge._cli.doctor.readings import read_releases, read_shared_memory
from weighbridge._cli.doctor.releases import KNOWN_FAULTS, SUPPORTED, KnownFault, check_release
from weighbridge._core.checks import Check, CheckStatus

ROOT = Path(__file__).parents[3]
OK, WARN, FAIL = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL
NOW = 1_800_000_000.0
DAY = 86_400.0


def status(package: str, installed: str) -> CheckStatus:
    found = check_release(package, installed)
    assert found is not None
    assert bool(found.fix) == (found.status is not OK)
    return found.status


def test_a_release_is_warned_of_only_if_it_is_known_to_break_something() -> None:
    assert status("transformers", "5.3.1") is WARN  # an engine may have it
    assert status("transformers", "5.5.4") is WARN
    assert status("transformers", "5.6.0") is OK
    assert status("sglang", "0.5.10.post2") is WARN
    assert status("sglang", "0.5.12") is OK
    assert status("torch", "2.13.1+cu130") is OK
    assert status("vllm", "0.33.0.post1") is OK
    assert check_release("left-pad", "1.0") is None


@pytest.mark.parametrize("package", SUPPORTED)
def test_a_release_newer_than_the_tested_one_is_no_warning(package: str) -> None:
    for newer in ("999", "999.1.0.dev2026"):
        assert status(package, newer) is OK
        assert f"tested up to {SUPPORTED[package].tested}" in check_release(package, newer).what


@pytest.mark.parametrize("package", SUPPORTED)
def test_a_release_older_than_the_oldest_fails_with_the_one_to_install(package: str) -> None:
    found = check_release(package, "0.0.9")
    assert found.status is FAIL
    assert f"{package}>={SUPPORTED[package].oldest}" in found.fix


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: f"{fault.package}-{fault.first}")
def test_what_is_known_to_break_is_a_release_that_is_supported_and_has_a_source_here(
    fault: KnownFault,
) -> None:
    oldest = Version(SUPPORTED[fault.package].oldest)
    assert oldest <= Version(fault.first) <= Version(fault.last)
    path, _, heading = fault.source.partition("#")
    text = (ROOT / path).read_text()
    slugs = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert not heading or heading in slugs


def distribution() -> list[Requirement]:
    """The requirements of weighbridge and of all its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*map(Requirement, project["dependencies"])] + [
        Requirement(each) for extra in project["optional-dependencies"].values() for each in extra
    ]


def test_the_oldest_releases_are_those_that_the_distribution_asks_for() -> None:
    asked = [each for each in distribution() if each.name in SUPPORTED]
    assert {"torch", "transformers", "megatron-core", "mbridge", "grpcio", "protobuf"} == {r.name for r in asked}
    for requirement in asked:
        lowest = [each.version for each in requirement.specifier if each.operator == ">="]
        assert lowest == [SUPPORTED[requirement.name].oldest], requirement


def test_releases_that_the_distribution_excludes_are_known_to_break_and_the_other_way_round() -> None:
    for requirement in distribution():
        faults = [each for each in KNOWN_FAULTS if each.package == requirement.name]
        for excluded in (each for each in requirement.specifier if each.operator == "!="):
            release = excluded.version.removesuffix(".*")
            assert any(fault.concerns(requirement.name, release) for fault in faults), requirement
    (service,) = [
        r for r in distribution() if r.name == "transformers" and any(e.operator == "!=" for e in r.specifier)
    ]
    for fault in KNOWN_FAULTS:
        if fault.package == "transformers":
            assert not service.specifier.contains(fault.first)
            assert not service.specifier.contains(f"{fault.last}.9")


def test_the_releases_that_tests_run_with_are_in_the_range_that_is_said_to_be_tested() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package in ("torch", "transformers", "megatron-core", "mbridge", "grpcio", "protobuf"):
        tested, parts = SUPPORTED[package].tested, SUPPORTED[package].tested.count(".") + 1
        within = ".".join(pinned[package].split(".")[:parts])
        assert Version(SUPPORTED[package].oldest) <= Version(pinned[package]), package
        assert Version(within) <= Version(tested), package


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_are_supported_from_the_oldest_to_the_newest_release_that_tests_run_in(engine: str) -> None:
    run = [path.stem.partition("-")[2] for path in (ROOT / "tests/engines/releases").glob(f"{engine}-*.txt")]
    pins = {"vllm": "requirements-vllm.txt", "sglang": "tests/support/sglang_cpu/requirements.txt"}
    text = (ROOT / pins[engine]).read_text()
    run += re.findall(rf"^{engine}(?:-cpu)?==([\d.]+)", text, re.MULTILINE)
    ordered = sorted(map(Version, run))
    supported = SUPPORTED[engine]
    assert Version(supported.oldest) == ordered[0]
    assert f"{ordered[-1]}.".startswith(f"{supported.tested}.")


def test_installed_packages_are_read_and_none_is_imported() -> None:
    before = set(sys.modules)
    found = dict(read_releases())
    assert found["grpcio"]
    assert not {"vllm", "sglang", "mbridge"} & (set(sys.modules) - before)


def test_a_clock_counts_as_wrong_only_beyond_what_can_be_told() -> None:
    # a service reports whole seconds: 0.9 s become 0
    assert check_skew(NOW, NOW + 0.2, NOW - 0.9).status is OK
    assert check_skew(NOW, NOW + 30, NOW + 20).status is OK
    late = check_skew(NOW, NOW + 0.1, NOW - 61)
    assert (late.status, "60 s behind" in late.what) == (WARN, True)
    early = check_skew(NOW, NOW + 0.1, NOW + 120.1)
    assert (early.status, "2 min ahead" in early.what) == (WARN, True)
    assert "NTP" in early.fix


def test_a_port_that_cannot_be_reached_fails_with_what_to_look_at() -> None:
    assert check_port(PortReading("h:1", "gRPC", seconds=0.002)) == Check("port of gRPC", OK, "h:1 answers in 2 ms")
    refused = check_port(PortReading("h:1", "streams of weights", "Connection refused"))
    assert refused.status is FAIL
    assert "h:1 cannot be reached: Connection refused" in refused.what
    assert "firewall" in refused.fix


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("certificate has expired", "renew"),
        ("certificate is not yet valid", "clocks"),
        ("Hostname mismatch, certificate is not valid for 'a'.", "name"),
        ("IP address mismatch, certificate is not valid for '10.0.0.1'.", "name"),
        ("unable to get local issuer certificate", "WEIGHBRIDGE_CA"),
        ("self-signed certificate in certificate chain", "WEIGHBRIDGE_CA"),
        ("WRONG_VERSION_NUMBER", "speak TLS"),
        ("something else", "WEIGHBRIDGE_CERT"),
    ],
)
def test_a_certificate_that_is_refused_fails_with_what_to_do(error: str, advice: str) -> None:
    found = check_certificate(CertificateReading("h:1", error), NOW)
    assert found.status is FAIL
    assert error in found.what
    assert advice in found.fix


def test_a_certificate_that_ends_soon_is_warned_of() -> None:
    soon = check_certificate(CertificateReading("h:1", expires_s=NOW + 3 * DAY, names=("h",)), NOW)
    assert (soon.status, "expires in 3 days" in soon.what) == (WARN, True)
    later = check_certificate(CertificateReading("h:1", expires_s=NOW + 90 * DAY, names=("h", "i")), NOW)
    assert (later.status, "for h, i" in later.what, later.fix) == (OK, True, "")


def test_a_lane_that_is_not_used_is_warned_of_only_where_it_could_be() -> None:
    socket = "/run/w/lane.sock"
    assert check_lane(LaneReading(socket)).status is OK
    assert check_lane(LaneReading(socket, error="gone", missing=True)).status is OK
    container = check_lane(LaneReading(socket, same_host=True, error="gone", missing=True))
    assert (container.status, "mount" in container.fix) == (WARN, True)
    denied = check_lane(LaneReading(socket, same_host=True, error="Permission denied"))
    assert (denied.status, "user" in denied.fix) == (WARN, True)
    assert check_lane(LaneReading("", "it is off")).status is OK
    off = check_lane(LaneReading("", "it is off", same_host=True))
    assert (off.status, "it is off" in off.what, "--local-socket" in off.fix) == (WARN, True, True)


def test_what_the_kernel_refuses_of_shared_memory_is_said() -> None:
    fine = SharedMemoryReading("6.18", policy="never")
    assert (check_shared_memory(fine).status, check_huge_pages(fine).status) == (OK, OK)
    none = SharedMemoryReading("6.18", shared="Operation not permitted")
    assert (check_shared_memory(none).status, check_huge_pages(none).status) == (FAIL, WARN)
    old = SharedMemoryReading("5.10", ahead="Invalid argument", huge="Invalid argument", policy="never")
    assert (check_shared_memory(old).status, check_huge_pages(old).status) == (WARN, WARN)
    assert "6.1" in check_huge_pages(old).fix
    denied = check_huge_pages(SharedMemoryReading("6.18", huge="Invalid argument", policy="deny"))
    assert "deny" in denied.fix


def test_shared_memory_of_this_machine_can_be_read() -> None:
    found = read_shared_memory()
    assert found.kernel
    assert not found.shared
