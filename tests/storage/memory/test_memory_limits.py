"""Limits on memory are found wherever they are set, and only what cannot be taken back counts as used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from weighbridge.errors import Unavailable
from weighbridge_storage.memory.memory_limits import (
    HOST,
    UNLIMITED,
    MemoryLimit,
    kind_of_file_system,
    parse_mounts,
    read_disk,
    read_memory,
)

GIB, MIB = 1 << 30, 1 << 20
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
STAT_V2 = (
    "anon 7\nfile 900\nshmem 500\ninactive_file {inactive}\nactive_file {active}\nfile_dirty "
    "{dirty}\nfile_writeback 0\n"
)


class Tree:
    """Files under a folder that stands for ``/``: a machine with 64 GiB, of which 40 are available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n")
        self.write("proc/self/status", "Name:\tpython\nVmSize:\t  2048 kB\nRssAnon:\t     300 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, path: str, **files: str) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/memory.{name}", f"{text}\n")

    def v1(self, path: str, limit: int, usage: int, stat: str = "") -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.stat", stat)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_machine_without_control_groups_is_its_own_limit(tree: Tree) -> None:
    reading = read_memory(tree.root)
    assert reading.limits == (MemoryLimit(HOST, 64 * GIB, 24 * GIB),)
    assert (reading.available, reading.most, reading.private) == (40 * GIB, 64 * GIB, 300 * 1024)


def test_a_container_sees_its_own_group_as_the_root(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2(".", max=f"{8 * GIB}", high="max", current=f"{3 * GIB}")
    found = read_memory(tree.root).tightest
    assert found == MemoryLimit("memory.max of control group /", 8 * GIB, 3 * GIB)


def test_the_tightest_of_all_groups_above_counts_and_not_only_the_own_one(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/kubepods/pod7/main\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2("kubepods/pod7/main", max="max", high="max", current=f"{1 * GIB}")
    tree.v2("kubepods/pod7", max=f"{10 * GIB}", current=f"{9 * GIB}")  # others of the pod have the rest
    tree.v2("kubepods", max=f"{32 * GIB}", current=f"{12 * GIB}")
    reading = read_memory(tree.root)
    assert reading.tightest == MemoryLimit("memory.max of control group /kubepods/pod7", 10 * GIB, 9 * GIB)
    assert {limit.name for limit in reading.limits} == {
        HOST,
        "memory.max of control group /kubepods/pod7",
        "memory.max of control group /kubepods",
    }


def test_where_the_kernel_slows_down_is_a_limit_too(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2(".", max=f"{8 * GIB}", high=f"{6 * GIB}", current="0")
    assert read_memory(tree.root).tightest == MemoryLimit("memory.high of control group /", 6 * GIB, 0)


def test_page_cache_is_not_used_memory_unless_it_waits_to_be_written(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("proc/self/mountinfo", V2)
    stat = STAT_V2.format(inactive=2 * GIB, active=1 * GIB, dirty=512 * MIB)
    tree.v2(".", max=f"{8 * GIB}", current=f"{7 * GIB}", stat=stat)
    assert read_memory(tree.root).tightest.used == 7 * GIB - (3 * GIB - 512 * MIB)


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_the_first_version_of_control_groups_is_read_also_where_its_root_is_elsewhere(tree: Tree, root: str) -> None:
    tree.write("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    tree.write("proc/self/mountinfo", V1.format(root=root))
    stat = (
        f"cache 1\ninactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\ntotal_dirty 0\ntotal_writeback 0\n"
        f"hierarchical_memory_limit {5 * GIB}\n"
    )
    tree.v1("docker/abc" if root == "/" else ".", 6 * GIB, 2 * GIB, stat)
    name = "/docker/abc" if root == "/" else "/"
    assert read_memory(tree.root).tightest == MemoryLimit(
        f"hierarchical_memory_limit of control group {name}", 5 * GIB, 1 * GIB
    )


def test_no_limit_is_none_in_both_versions(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "5:memory:/a\n0::/a\n")
    tree.write("proc/self/mountinfo", f"{V1.format(root='/')}\n{V2.replace('/sys/fs/cgroup', '/unified')}")
    tree.v1("a", 9223372036854771712, GIB, "hierarchical_memory_limit 9223372036854771712\n")
    tree.write("unified/a/memory.max", "max\n")
    tree.write("unified/a/memory.current", "4096\n")
    assert [limit.name for limit in read_memory(tree.root).limits] == [HOST]


def test_a_group_outside_of_what_is_mounted_is_read_at_the_mount(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/../../other\n")
    tree.write("proc/self/mountinfo", V2)
    tree.v2(".", max=f"{4 * GIB}", current="0")
    assert read_memory(tree.root).tightest.limit == 4 * GIB


def test_a_limit_on_the_address_space_counts(tree: Tree) -> None:
    tree.write(
        "proc/self/limits",
        (
            f"Limit   Soft Limit   Hard Limit   Units\nMax address space         {3 * GIB}         "
            "  unlimited            bytes\n"
        ),
    )
    assert read_memory(tree.root).tightest == MemoryLimit("RLIMIT_AS (ulimit -v) of the process", 3 * GIB, 2048 * 1024)


def test_files_that_make_no_sense_are_no_limit(tree: Tree) -> None:
    for path in (
        "proc/meminfo",
        "proc/self/cgroup",
        "proc/self/mountinfo",
        "proc/self/limits",
        "proc/self/status",
    ):
        tree.write(path, "\x00 - :::\nMax address space\nMemTotal: x kB\n: \n0::\n5:memory\n")
    assert read_memory(tree.root).available == UNLIMITED
    assert read_memory(tree.root / "nowhere").available == UNLIMITED


def test_what_this_machine_says_agrees_with_the_c_library() -> None:
    reading = read_memory()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert next(limit.limit for limit in reading.limits if limit.name == HOST) == total
    assert 0 < reading.available <= total


@pytest.mark.process
def test_address_space_of_a_real_process() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from weighbridge_storage.memory.memory_limits import read_memory\n"
        "print(*[limit.limit for limit in read_memory().limits if 'RLIMIT_AS' in limit.name])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == f"{8 * GIB}\n"


def test_a_folder_in_memory_is_told_from_one_on_a_disk(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "root")
    folder = tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", r"\040")
    lines = ["1 0 0:1 / / rw - ext4 /dev/x rw", f"2 1 0:2 / {point} rw shared:7 - tmpfs none rw,size=4k"]
    tree.write("proc/self/mountinfo", "\n".join(lines))
    inside, outside = read_disk(folder, tree.root), read_disk(tmp_path, tree.root)
    assert (inside.in_memory, outside.in_memory) == (True, False)
    status = os.statvfs(folder)
    assert inside.size == status.f_blocks * status.f_frsize


def test_of_mounts_at_one_place_the_last_hides_the_others() -> None:
    mounts = parse_mounts("1 0 0:1 / /a rw - ext4 x rw\n2 1 0:2 / /a rw - tmpfs x rw\n3 1 0:3 / /ab rw - xfs x rw")
    assert kind_of_file_system(PurePosixPath("/a/b"), mounts) == "tmpfs"
    assert kind_of_file_system(PurePosixPath("/elsewhere"), mounts) == ""


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nowhere"):
        read_disk(tmp_path / "nowhere")
