"""The memory budget follows from the machine's limits, and doctor's checks say what does not fit and what to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core import dtypes
from weighbridge._core.checks import Check, CheckStatus
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge_service.health.doctor import examine_machine
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.runtime.memory_plan import (
    MemoryBudget,
    MemoryReport,
    ModelSize,
    Needs,
    check_memory,
    check_model,
    check_store_disk,
    choose_budget,
    image_bytes,
    room_for_images,
)
from weighbridge_storage.memory.image_books import HeldFor, Holding, ImageOwner
from weighbridge_storage.memory.image_decisions import NO_SPACE, Space
from weighbridge_storage.memory.image_pool import Waiting
from weighbridge_storage.memory.images import place_files
from weighbridge_storage.memory.memory_limits import HOST, UNLIMITED, DiskReading, MemoryLimit, MemoryReading

GB, MIB = 10**9, 1 << 20
NEEDS = Needs(process=2 * GB)
GROUP = MemoryLimit("memory.max of control group /", 40 * GB, 5 * GB)
MACHINE = MemoryLimit(HOST, 900 * GB, 100 * GB)
"""Of 40 GB for the container, 35 are left; the process has 1 of the 2 GB that it may come to need."""
READING = MemoryReading((MACHINE, GROUP), 1 * GB)
DISK = DiskReading("/scratch", 500 * GB, 300 * GB, in_memory=False)


def report(memory: Space, **changes: object) -> MemoryReport:
    disk = Space(UNLIMITED, 0, (), 300 * GB, 300 * GB)
    found = MemoryReport(
        MemoryBudget(memory.budget, True, "as set by --memory-budget"),
        NEEDS,
        READING,
        memory,
        disk,
        DISK,
        0,
        0,
        (),
        (),
    )
    return replace(found, **changes)


def test_a_container_is_used_up_to_what_the_service_itself_needs() -> None:
    assert choose_budget(None, READING, NEEDS).nbytes == 34 * GB // MIB * MIB


def test_of_a_machine_that_others_use_too_half_is_taken() -> None:
    reading = MemoryReading((MACHINE,), 1 * GB)
    assert choose_budget(None, reading, NEEDS).nbytes == 799 * GB // 2 // MIB * MIB


def test_a_budget_that_somebody_names_is_taken_as_it_is() -> None:
    assert choose_budget(7, READING, NEEDS) == MemoryBudget(7, True, "as set by --memory-budget")
    assert choose_budget(0, READING, NEEDS).nbytes == 0


def test_a_read_cache_in_memory_is_left_its_room() -> None:
    assert choose_budget(None, READING, replace(NEEDS, cache=30 * GB)).nbytes == 4 * GB // MIB * MIB
    assert choose_budget(None, READING, replace(NEEDS, cache=50 * GB)).nbytes == 0


@given(st.integers(0, 3 * GB))
def test_images_keep_their_room_while_the_process_grows_to_what_was_expected(private: int) -> None:
    group = replace(GROUP, used=4 * GB + private)  # 4 GB are others'
    room = room_for_images(MemoryReading((group,), private), NEEDS)
    if private <= 2 * GB - 128 * MIB:
        assert room.available == 34 * GB
    assert room.available <= group.available - 128 * MIB
    assert room.most == 38 * GB


def test_nothing_known_of_the_machine_is_no_limit() -> None:
    assert room_for_images(MemoryReading((MemoryLimit("", UNLIMITED, 0),), 0), NEEDS).most == UNLIMITED


@pytest.mark.parametrize("shard_bytes", [5 * GB, 1 << 62])
def test_what_a_model_needs_is_not_estimated_too_low(shard_bytes: int) -> None:
    specs = [
        TensorSpec(
            f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight_scale_inv",
            dtypes.parse("bf16"),
            (512, 128),
        )
        for layer in range(60)
        for expert in range(64)
    ]
    files = lay_out_files(specs, shard_bytes)
    exact = place_files(files.file_sizes)[1]
    estimate = image_bytes(files.layout.nbytes, len(specs))
    assert exact <= estimate <= exact * 1.01


@pytest.mark.parametrize(
    ("nbytes", "status", "says"),
    [
        (10 * GB, CheckStatus.OK, "beside the live version fit two pushes at a time"),
        (14 * GB, CheckStatus.OK, "beside the live version fit one push, and no second one"),
        (20 * GB, CheckStatus.WARN, "one fits there, and none beside it once it is live"),
        (50 * GB, CheckStatus.WARN, "not even one fits there"),
        (400 * GB, CheckStatus.FAIL, "more than images can have, 34.0 GB of memory and 300.0 GB of disk"),
    ],
)
def test_what_a_push_needs_is_set_against_what_there_is(nbytes: int, status: CheckStatus, says: str) -> None:
    check = check_model(ModelSize("acme/m", nbytes), report(Space(34 * GB, 0, (), 34 * GB, 38 * GB)))
    assert (check.status, check.name) == (status, "push of acme/m")
    assert says in check.what
    assert bool(check.fix) is (status is not CheckStatus.OK)


def test_what_other_models_hold_is_not_there_for_this_one() -> None:
    memory = Space(34 * GB, 20 * GB, (), 14 * GB, 38 * GB)
    held = Holding(ImageOwner("acme/other", 1), 20 * GB, True, HeldFor.READY, 5.0)
    check = check_model(ModelSize("acme/m", 8 * GB), report(memory, holdings=(held,)))
    assert check.status is CheckStatus.WARN
    assert "14.0 GB of memory (and 20.0 GB that other models hold): one fits there" in check.what
    assert check.fix == f"serve with --memory-budget {-(-36 * GB >> 20)}MiB or more"
    own = replace(held, owner=ImageOwner("acme/m", 1))
    assert check_model(ModelSize("acme/m", 8 * GB), report(memory, holdings=(own,))).status is CheckStatus.OK


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_service_has_nothing_to_change() -> None:
    checks = check_memory(report(Space(34 * GB, 0, (), 34 * GB, 38 * GB)))
    assert {check.status for check in checks} == {CheckStatus.OK}
    assert {check.fix for check in checks} == {""}


def test_a_budget_that_is_not_there_is_said_with_the_figures() -> None:
    found = by_name(check_memory(report(Space(64 * GB, 0, (), 34 * GB, 38 * GB))))["memory budget"]
    assert found.status is CheckStatus.WARN
    assert "64.0 GB" in found.what
    assert "38.0 GB at most" in found.what
    assert f"--memory-budget {38 * GB >> 20}MiB" in found.fix


def test_memory_that_others_have_taken_since_is_said() -> None:
    found = by_name(check_memory(report(Space(34 * GB, 10 * GB, (), 3 * GB, 38 * GB))))["memory budget"]
    assert found.status is CheckStatus.WARN
    assert "24.0 GB of it are not taken yet, and the machine has only 3.0 GB left" in found.what


def test_a_limit_that_leaves_the_service_too_little_is_named() -> None:
    reading = MemoryReading((MACHINE, replace(GROUP, used=int(39.5 * GB))), 1 * GB)
    found = by_name(check_memory(report(Space(0, 0, (), 0, 38 * GB), reading=reading)))
    assert found["memory limits"].status is CheckStatus.WARN
    assert GROUP.name in found["memory limits"].what
    assert found["memory budget"].status is CheckStatus.WARN


def test_who_waits_is_named_with_those_who_have_the_memory() -> None:
    held = Holding(ImageOwner("acme/a", 7), 30 * GB, True, HeldFor.READERS, 900.0, 2, 400.0)
    memory = Space(34 * GB, 30 * GB, (), 4 * GB, 38 * GB)
    waiting = Waiting(ImageOwner("acme/b", 1), 8 * GB, 12.0, "8.0 GB do not fit")
    found = by_name(check_memory(report(memory, holdings=(held,), waiting=(waiting,))))["images"]
    assert found.status is CheckStatus.WARN
    assert "acme/b@1 has waited 12 s: 8.0 GB do not fit" in found.what
    assert "acme/a@7: 30.0 GB of memory, kept by 2 readers, for 6 min" in found.what
    late = by_name(check_memory(report(memory, holdings=(held,))))["images"]
    assert (late.status, "release tensors" in late.fix) == (CheckStatus.WARN, True)
    early = replace(held, reading_seconds=10.0)
    assert by_name(check_memory(report(memory, holdings=(early,))))["images"].status is CheckStatus.OK


def test_a_disk_that_is_too_small_is_said() -> None:
    assert check_store_disk(DISK, 300 * GB).status is CheckStatus.OK
    assert check_store_disk(DISK, 301 * GB).status is CheckStatus.FAIL
    found = by_name(check_memory(report(NO_SPACE, read_cache=100 * GB, read_cache_budget=500 * GB)))
    assert found["read cache"].status is CheckStatus.WARN
    in_memory = replace(DISK, in_memory=True)
    assert by_name(check_memory(report(NO_SPACE, scratch=in_memory)))["scratch folder"].status is CheckStatus.WARN


def test_without_a_service_a_machine_of_files_is_looked_at(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": f"{16 << 30}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    checks = by_name(examine_machine(ServiceConfig(tmp_path / "not" / "yet"), root))
    assert str(tmp_path) in checks["scratch folder"].what
    # 16 GiB less 1 GiB for the process and 256 MiB for weights in flight
    assert (
        f"{((16 << 30) - (1280 << 20)) / 1e9:.1f} GB, what memory.max of control group / left"
        in checks["memory budget"].what
    )
    wanted = examine_machine(ServiceConfig(tmp_path, memory_budget=20 << 30), root)
    assert by_name(wanted)["memory budget"].status is CheckStatus.WARN
