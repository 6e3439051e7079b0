"""Ports of servers that must know theirs before they listen, or keep it over restarts."""

from __future__ import annotations

import os
import random
import socket

# Below what Linux hands out by itself (ip_local_port_range, from 32768), so that no connection of another test takes
# one meanwhile.
_PORTS = range(16384, 32768)

# Sockets whose names no other process can bind while this one lives: one for each port that it has taken.
_taken: list[socket.socket] = []


def reserved_ports(count: int) -> list[int]:
    """Ports of this process, until it ends, among all processes that take theirs here.

    Raises:
        OSError: fewer are left.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            return ports
        if _is_reserved_now(port) and _is_unused(port):
            ports.append(port)
    raise OSError(f"{len(ports)} of {count} ports are free in {_PORTS}")


def reserved_port() -> int:
    """One reserved port, as `reserved_ports`."""
    return reserved_ports(1)[0]


def own_network() -> str:
    """The first three numbers of loopback addresses at which no other process of this machine listens: fixed ports are
    free there. Linux.
    """
    high, low = divmod(os.getpid() % 65_000 + 256, 256)
    return f"127.{high}.{low}"


def _is_reserved_now(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0weighbridge-tests-port-{port}")
    except OSError:
        name.close()
        return False
    _taken.append(name)
    return True


def _is_unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
