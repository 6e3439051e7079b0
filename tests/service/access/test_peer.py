"""Is the other end of a connection read as gRPC names it?"""

from __future__ import annotations

import pytest

from weighbridge_service.access.peer import LOCAL, Peer


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.7:41234", Peer("10.0.0.7", "41234")),
        ("ipv6:%5B::1%5D:41234", Peer("::1", "41234")),
        ("ipv6:[2001:db8::7]:1", Peer("2001:db8::7", "1")),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", Peer("fe80::1%eth0", "80")),
        ("unix:/run/weighbridge", Peer(LOCAL, "/run/weighbridge")),
        ("unix:", Peer(LOCAL, "")),
        ("unknown", Peer(LOCAL, "")),
        ("", Peer(LOCAL, "")),
    ],
)
def test_a_peer_is_read_as_grpc_names_it(text: str, peer: Peer) -> None:
    assert Peer.of_grpc(text) == peer
