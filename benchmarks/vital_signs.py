"""Resources that a process holds: memory, threads and descriptors, as the kernel counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VitalSigns:
    """Resources of a process at one moment.

    Attributes:
        resident: bytes that are resident.
        most_resident: peak of resident bytes since `forget_most`.
        threads: threads.
        descriptors: open descriptors.
        cpu_seconds: processor time that it has taken so far.
    """

    resident: int
    most_resident: int
    threads: int
    descriptors: int
    cpu_seconds: float

    def back_at(self, start: VitalSigns, memory: int) -> dict[str, bool]:
        """Whether each resource is back at its start: threads and descriptors within a tenth, or a few; memory within
        so many bytes.
        """
        return {
            "threads": _near(self.threads, start.threads),
            "descriptors": _near(self.descriptors, start.descriptors),
            "memory": self.resident <= start.resident + memory,
        }


_FEW = 40
"""Threads for control calls come and go as the calls of bystanders fall."""


def _near(now: int, start: int) -> bool:
    return now <= max(start * 11 // 10, start + _FEW)


def vital_signs(pid: int) -> VitalSigns:
    """Vital signs of a process. Raises OSError if it does not exist."""
    text = Path(f"/proc/{pid}/status").read_text("utf-8")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    # the name, in parentheses, may have spaces in it
    times = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    return VitalSigns(
        resident=_kibibytes(fields["VmRSS"]),
        most_resident=_kibibytes(fields["VmHWM"]),
        threads=int(fields["Threads"]),
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        cpu_seconds=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
    )


def forget_most(pid: int) -> None:
    """Let `VitalSigns.most_resident` begin anew. Source: proc_pid_clear_refs(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _kibibytes(field: str) -> int:
    return int(field.split(maxsplit=1)[0]) * 1024
