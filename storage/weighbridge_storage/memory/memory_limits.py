"""Memory limits of this process: its control groups, its address space, and the machine it runs on.

Images are shared memory. The kernel charges it to the first control group that touches it, and does not reclaim it. If
a limit is exceeded, the kernel kills a process. So the service reads the limits before it allocates memory. All limits
count: the process's control group, each of its ancestors, and the memory left on the machine. Page cache can be
reclaimed and does not count as used, unless it waits to be written.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst ("Memory") and cgroup-v1/memory.rst; proc(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from weighbridge._core.text.sizes import readable_size
from weighbridge_storage.stores.objects import error_for

UNLIMITED = 1 << 62
"""More than any machine has. Control groups of version 1 report a number near 2**63 if there is no limit."""
HOST = "this machine"
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_ESCAPED = re.compile(r"\\([0-7]{3})")
_ADDRESS_SPACE = re.compile(r"^Max address space +([0-9]+)", re.MULTILINE)
_KIB = 1024


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit on memory, of this process alone or together with others.

    Attributes:
        name: name of the limit, for messages.
        limit: maximum bytes.
        used: bytes in use that cannot be reclaimed.
    """

    name: str
    limit: int
    used: int

    @property
    def available(self) -> int:
        """Bytes left."""
        return max(self.limit - self.used, 0)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """All limits at one moment.

    Attributes:
        limits: the limits; at least one.
        private: bytes of private memory of this process and its helpers.
    """

    limits: tuple[MemoryLimit, ...]
    private: int

    @property
    def tightest(self) -> MemoryLimit:
        """The limit with the least memory left."""
        return min(self.limits, key=lambda limit: limit.available)

    @property
    def available(self) -> int:
        """Bytes that are left under all limits."""
        return self.tightest.available

    @property
    def most(self) -> int:
        """Bytes that this process could have if no other process used any."""
        return min(limit.limit for limit in self.limits)


@dataclass(frozen=True, slots=True)
class DiskReading:
    """A file system at one moment.

    Attributes:
        folder: a folder on it.
        size: its size in bytes.
        available: bytes of it that this user can still use.
        in_memory: whether it keeps its files in memory.
    """

    folder: str
    size: int
    available: int
    in_memory: bool

    def __str__(self) -> str:
        return f"{self.folder} has {readable_size(self.available)} of {readable_size(self.size)} free"


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        root: the folder of the file system that is mounted.
        point: mount point.
        kind: the file system's type.
        options: options of the file system; for control groups of version 1, the controllers.
    """

    root: PurePosixPath
    point: PurePosixPath
    kind: str
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """The mounts in ``/proc/self/mountinfo``, in its order. Malformed lines are skipped."""
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if separator and len(head) >= 5 and len(tail) >= 3:
            root, point = (PurePosixPath(_unescaped(part)) for part in head[3:5])
            found.append(Mount(root, point, tail[0], frozenset(tail[2].split(","))))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def group_folders(cgroup: str, mounts: Iterable[Mount]) -> list[tuple[int, list[PurePosixPath]]]:
    """Folders of the memory control groups that contain a process, for each mounted version.

    Args:
        cgroup: content of ``/proc/self/cgroup``.
        mounts: all mounts.

    Returns:
        The version, 1 or 2, and the folders: the process's own group first, then its ancestors, as far as they are
        visible.
    """
    found = []
    for line in cgroup.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        for mount in mounts:
            if version == 2 and mount.kind == "cgroup2":
                found.append((2, _upwards(mount, PurePosixPath(path))))
                break
            if version == 1 and mount.kind == "cgroup" and "memory" in mount.options:
                found.append((1, _upwards(mount, PurePosixPath(path))))
                break
    return found


def _upwards(mount: Mount, path: PurePosixPath) -> list[PurePosixPath]:
    """A group's folder and its ancestors. If a group is outside the mount, only the mount itself is visible."""
    inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    folder = mount.point / inside
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount.point))]


def group_limit(version: int, name: str, files: Mapping[str, str]) -> MemoryLimit | None:
    """The limit of one control group; None if it has no limit.

    Args:
        version: version of control groups, 1 or 2.
        name: the group's path.
        files: content of its files by name; missing files are omitted.
    """
    usage = _number(files.get("memory.current" if version == 2 else "memory.usage_in_bytes", ""))
    stat = parse_fields(files.get("memory.stat", ""))
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = {each: _number(files.get(each, "")) for each in names}
    if version == 1 and "hierarchical_memory_limit" in stat:
        limits["hierarchical_memory_limit"] = stat["hierarchical_memory_limit"]
    set_ = {each: limit for each, limit in limits.items() if limit is not None and limit < UNLIMITED}
    if usage is None or not set_:
        return None
    tightest = min(set_, key=lambda each: set_[each])
    return MemoryLimit(f"{tightest} of control group {name}", set_[tightest], usage - _reclaimable(version, stat))


def _reclaimable(version: int, stat: Mapping[str, int]) -> int:
    """Bytes of page cache that can be reclaimed at once. Shared memory is not part of these lists."""
    prefix = "" if version == 2 else "total_"
    dirty, writing = ("file_dirty", "file_writeback") if version == 2 else ("total_dirty", "total_writeback")
    clean = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(clean - stat.get(dirty, 0) - stat.get(writing, 0), 0)


def parse_fields(text: str) -> dict[str, int]:
    """Numbers by name, from lines such as ``MemTotal:  16 kB`` or ``inactive_file 4096``; in bytes."""
    found = {}
    for line in text.splitlines():
        words = line.replace(":", " ", 1).split()
        if len(words) in (2, 3) and words[1].isdigit():
            found[words[0]] = int(words[1]) * (_KIB if words[2:] == ["kB"] else 1)
    return found


def _number(text: str) -> int | None:
    """The number in a control group's file; None for ``max`` and anything else that is not a number."""
    text = text.strip()
    return int(text) if text.isdigit() else None


def host_limit(meminfo: str) -> MemoryLimit | None:
    """Limit of the machine, from ``/proc/meminfo``; None if a field is missing."""
    fields = parse_fields(meminfo)
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return None
    return MemoryLimit(HOST, fields["MemTotal"], fields["MemTotal"] - fields["MemAvailable"])


def address_space_limit(limits: str, status: str) -> MemoryLimit | None:
    """RLIMIT_AS, from ``/proc/self/limits`` and ``/proc/self/status``; None if it is unlimited."""
    found = _ADDRESS_SPACE.search(limits)
    if found is None:
        return None
    used = parse_fields(status).get("VmSize", 0)
    return MemoryLimit("RLIMIT_AS (ulimit -v) of the process", int(found[1]), used)


_helpers: set[int] = set()


def count_helper(pid: int) -> None:
    """Count the memory of a helper process as part of this one's from now on."""
    _helpers.add(pid)


def forget_helper(pid: int) -> None:
    """Stop counting a helper process, which has ended."""
    _helpers.discard(pid)


def read_memory(root: Path = Path("/")) -> MemoryReading:
    """Read all limits.

    Args:
        root: folder to use as ``/``.
    """
    process = root / "proc" / "self"
    status = _read(process / "status")
    mounts = parse_mounts(_read(process / "mountinfo"))
    found = [
        host_limit(_read(root / "proc" / "meminfo")),
        address_space_limit(_read(process / "limits"), status),
    ]
    for version, folders in group_folders(_read(process / "cgroup"), mounts):
        found += [
            group_limit(version, f"/{folder.relative_to(folders[-1])}".removesuffix("."), _group_files(root, folder))
            for folder in folders
        ]
    limits = tuple(limit for limit in found if limit is not None)
    own = [status, *(_read(root / "proc" / str(pid) / "status") for pid in tuple(_helpers))]
    private = sum(parse_fields(each).get("RssAnon", 0) for each in own)
    return MemoryReading(limits or (MemoryLimit("nothing that is known", UNLIMITED, 0),), private)


def _group_files(root: Path, folder: PurePosixPath) -> dict[str, str]:
    names = (
        *("memory.max", "memory.high", "memory.current", "memory.stat"),
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    where = root / folder.relative_to("/")
    return {name: text for name in names if (text := _read(where / name))}


def _read(path: Path) -> str:
    """A file's content; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def read_disk(folder: str | os.PathLike[str], root: Path = Path("/")) -> DiskReading:
    """Read the size and the free space of a folder's file system.

    Args:
        folder: an existing folder.
        root: folder to use as ``/`` when looking for mounts.

    Raises:
        WeighbridgeError: the file system cannot be read.
    """
    path = os.path.realpath(folder)
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise error_for(error, f"looking for room in {path}") from error
    mounts = parse_mounts(_read(root / "proc" / "self" / "mountinfo"))
    kind = kind_of_file_system(PurePosixPath(path), mounts)
    return DiskReading(
        path,
        status.f_blocks * status.f_frsize,
        status.f_bavail * status.f_frsize,
        kind in _MEMORY_FILE_SYSTEMS,
    )


def kind_of_file_system(path: PurePosixPath, mounts: Iterable[Mount]) -> str:
    """The type of the file system that contains a path; empty if unknown."""
    return max(_holding(path, mounts), default=(0, 0, ""))[2]


def _holding(path: PurePosixPath, mounts: Iterable[Mount]) -> Iterator[tuple[int, int, str]]:
    """Depth, index and type of the mounts above a path. The largest tuple is the mount that contains the path."""
    for number, mount in enumerate(mounts):
        if path.is_relative_to(mount.point):
            yield len(mount.point.parts), number, mount.kind
