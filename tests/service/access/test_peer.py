"""Is the other end of a connection read as gRPC names it?"""

from __future__ import annotations

import pytest

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import PermissionDenied
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.peer import LOCAL, Peer, authorize
from weighbridge_service.access.scopes import Scope


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


def test_a_scope_of_refs_allows_no_version_by_number() -> None:
    some, every = (Peer("::1", identity=Identity("a", (Scope.parse(f"approve:acme/smol{at}"),))) for at in ("@2*", ""))
    for ref in ("2.x", "2-canary"):
        authorize(some, Verb.APPROVE, "acme/smol", ref)
    for number in ("2", "21"):
        authorize(every, Verb.APPROVE, "acme/smol", number)
        with pytest.raises(PermissionDenied, match="a may not approve acme/smol\n") as refused:
            authorize(some, Verb.APPROVE, "acme/smol", number)
        assert "the scope approve:acme/smol" in refused.value.fix
