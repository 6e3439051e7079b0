"""Findings of doctor, each from a reading: of clocks, ports, certificates, the local lane, shared memory and huge
pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.checks import Check, CheckStatus
from weighbridge._core.text.durations import readable_duration

_MOST_SKEW_S = 5.0
"""Clock difference above which times in lists, logs and traces are misleading; tokens and certificates tolerate
more.
"""
_SOON_DAYS = 14
"""Days before its end by which a certificate should have been renewed."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PortReading:
    """Result of connecting to an address.

    Attributes:
        address: ``host:port``.
        what: protocol that is expected there, such as ``gRPC``.
        error: why it is unreachable; empty if it is reachable.
        seconds: duration of the connection attempt.
    """

    address: str
    what: str
    error: str = ""
    seconds: float = 0.0


def check_port(reading: PortReading) -> Check:
    """Whether something listens at an address."""
    name = f"port of {reading.what}"
    if not reading.error:
        return Check.ok(name, f"{reading.address} answers in {readable_duration(reading.seconds)}")
    return Check.fail(
        name,
        f"{reading.address} cannot be reached: {reading.error}",
        "is the service running, is this its address, and does a firewall or a network policy let connections through?",
    )


@dataclass(frozen=True, slots=True)
class CertificateReading:
    """Result of a TLS handshake that checked the certificate.

    Attributes:
        address: ``host:port``.
        error: why the certificate or the handshake was refused; empty on success.
        expires_s: end of its validity, Unix time in seconds; 0 if the handshake failed.
        names: names for which it was issued.
    """

    address: str
    error: str = ""
    expires_s: float = 0.0
    names: tuple[str, ...] = ()


def check_certificate(reading: CertificateReading, now_s: float) -> Check:
    """Check the certificate at an address: whether it is valid for this name and issued by a trusted authority, and
    when it expires.

    Args:
        reading: result of the handshake.
        now_s: Unix time in seconds.
    """
    name = f"certificate of {reading.address}"
    if reading.error:
        return Check.fail(name, f"it is refused: {reading.error}", _certificate_fix(reading.error))
    days = (reading.expires_s - now_s) / _DAY_S
    what = f"it is for {', '.join(reading.names) or 'no name'}, and expires in {days:.0f} days"
    if days < _SOON_DAYS:
        return Check.warn(
            name,
            what,
            "renew it: a service reads the files again when they change, without a restart",
        )
    return Check.ok(name, what)


def _certificate_fix(error: str) -> str:
    """Advice for a handshake that failed, chosen by OpenSSL's message."""
    text = error.lower().replace("_", " ")
    if "expired" in text:
        return "renew it (serve --tls-cert): a service reads the files again when they change, without a restart"
    if "not yet valid" in text:
        return "its validity begins later: compare the clocks of both machines"
    if "mismatch" in text or "doesn't match" in text or "not valid for" in text:
        return "use a name for which it was issued, or issue one for this name"
    if "issuer" in text or "self-signed" in text or "self signed" in text:
        return (
            "WEIGHBRIDGE_CA must name the file of the authority that has issued it, and the "
            "service must send any intermediate certificates"
        )
    if "wrong version" in text or "unknown protocol" in text or "eof" in text or "reset" in text:
        return "does the service speak TLS at this port (serve --tls-cert)? Otherwise unset WEIGHBRIDGE_CA"
    return (
        "name the service's authority in WEIGHBRIDGE_CA, and a certificate of this client "
        "(WEIGHBRIDGE_CERT, WEIGHBRIDGE_KEY) if it asks for one"
    )


def check_skew(asked_s: float, answered_s: float, said_s: float) -> Check:
    """Whether this machine's clock and that of a service agree.

    Args:
        asked_s, answered_s: when the request was sent and when its response arrived, by this machine's clock, as Unix
            time in seconds.
        said_s: the service's clock in between, rounded down to a whole second.
    """
    behind, ahead = asked_s - (said_s + 1), said_s - answered_s
    offset = max(behind, ahead, 0.0)
    name = "clock of the service"
    if offset <= _MOST_SKEW_S:
        return Check.ok(
            name,
            f"it differs from this machine's by {readable_duration(offset, rough=True)}, as far as can be measured",
        )
    which = "behind" if behind > ahead else "ahead of"
    return Check.warn(
        name,
        (
            f"it is {readable_duration(offset, rough=True)} {which} this machine's: times in lists "
            "and traces mislead, and tokens may count as expired"
        ),
        "set the clocks of all machines by NTP",
    )


@dataclass(frozen=True, slots=True)
class LaneReading:
    """State of a service's local socket, as seen by this process.

    Attributes:
        socket: its path, as reported by the service; empty if it has none.
        unavailable: why it has none.
        same_host: whether the service's address belongs only to this machine.
        error: why this process cannot connect to it; empty if it can.
        missing: whether there is nothing at the path.
    """

    socket: str
    unavailable: str = ""
    same_host: bool = False
    error: str = ""
    missing: bool = False


def check_lane(reading: LaneReading) -> Check:
    """Check whether this process can share memory with the service, and otherwise why not."""
    name = "local lane"
    if not reading.socket:
        status = CheckStatus.WARN if reading.same_host else CheckStatus.OK
        why = reading.unavailable or "it has no socket"
        fix = "start it with --local-socket auto, or a path that clients can reach" if reading.same_host else ""
        return Check(name, status, f"the service shares no memory: {why}", fix)
    if not reading.error:
        return Check.ok(name, f"{reading.socket} answers: weights need no network")
    if reading.missing and not reading.same_host:
        return Check.ok(
            name,
            f"{reading.socket} is not on this machine: weights go over gRPC, as to any other machine",
        )
    if reading.missing:
        return Check.warn(
            name,
            f"{reading.socket} does not exist for this process: weights go over gRPC, through the kernel's loopback",
            (
                "in a container, mount the folder of the socket at the same path (serve "
                "--local-socket /run/weighbridge/lane.sock)"
            ),
        )
    return Check.warn(
        name,
        f"{reading.socket} cannot be used: {reading.error}; weights go over gRPC",
        "run as the service's user, or have it use a folder that this user may enter (serve --local-socket)",
    )


@dataclass(frozen=True, slots=True)
class SharedMemoryReading:
    """Result of allocating a little shared memory on this machine.

    Attributes:
        kernel: release of Linux.
        shared: why memory without a file system cannot be shared (memfd_create); empty if it can.
        ahead: why it cannot be allocated ahead of its use (MADV_POPULATE_WRITE); empty if it can.
        huge: why its pages cannot be collapsed into huge pages (MADV_COLLAPSE); empty if they can.
        policy: the kernel's policy on huge pages of shared memory (``shmem_enabled``); empty if it has none.
    """

    kernel: str
    shared: str = ""
    ahead: str = ""
    huge: str = ""
    policy: str = ""


def check_shared_memory(reading: SharedMemoryReading) -> Check:
    """Check whether a service on this machine can share memory, and allocate it before its first use."""
    name = "shared memory"
    if reading.shared:
        return Check.fail(
            name,
            f"it cannot be allocated without a file system (memfd_create): {reading.shared}",
            "allow memfd_create, e.g. in the seccomp profile of the container",
        )
    if reading.ahead:
        return Check.warn(
            name,
            (
                f"Linux {reading.kernel} does not allocate it ahead of its use "
                f"(MADV_POPULATE_WRITE): {reading.ahead}; first pushes are slower"
            ),
            "use Linux 5.14 or newer",
        )
    return Check.ok(name, "it is allocated ahead of its use; the size of /dev/shm does not matter")


def check_huge_pages(reading: SharedMemoryReading) -> Check:
    """Check whether shared memory of a service on this machine has huge pages."""
    name = "huge pages"
    if not reading.huge and not reading.shared:
        return Check.ok(name, "shared memory has them")
    why = reading.huge or "there is no shared memory"
    fix = (
        (
            "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled, as root: deny also "
            "refuses huge pages that a process requests"
        )
        if reading.policy == "deny"
        else (
            "use Linux 6.1 or newer, with transparent huge pages; if memory is fragmented, "
            "restart the machine or free memory"
        )
    )
    said = f", and shmem_enabled is {reading.policy}" if reading.policy else ""
    what = (
        f"Linux {reading.kernel} does not collapse shared memory into any (MADV_COLLAPSE): "
        f"{why}{said}; first pushes and mappings are slower"
    )
    return Check.warn(name, what, fix)
