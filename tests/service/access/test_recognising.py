"""Is a caller identified by its credentials, and by nothing else?"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.identities import AUDIENCE, ISSUER, TokenIssuer, identity, policy_file
from tests.support.waiting import eventually
from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_service.access import issuers
from weighbridge_service.access.access import Access
from weighbridge_service.access.identities import Identity, PresentedCredentials
from weighbridge_service.access.issuers import Issuer, KeyRing

KEY = b"k" * 32


def shown(token: str) -> PresentedCredentials:
    return PresentedCredentials(f"Bearer {token}")


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> TokenIssuer:
    return TokenIssuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture
def access(tmp_path: Path, issuer: TokenIssuer) -> Access:
    policy = policy_file(
        tmp_path,
        issuer.table,
        identity("trainer", ["push:acme/*"], token="trainers", users=[1000]),
        identity("engine", ["pull:acme/*"], certificates=["engine-*"], subjects=["test|engines:*"]),
    )
    return Access(policy, KEY)


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        (shown("trainers"), "trainer"),
        (PresentedCredentials("bearer trainers"), "trainer"),
        (PresentedCredentials(user=1000), "trainer"),
        (PresentedCredentials(certificate=("x", "engine-7")), "engine"),
        (PresentedCredentials(), ""),
        (PresentedCredentials(user=1001), ""),
        (PresentedCredentials(certificate=("trainer",)), ""),
        (shown("Trainers"), ""),
        (shown(""), ""),
        (PresentedCredentials("Basic trainers"), ""),
        (PresentedCredentials("trainers"), ""),
        (PresentedCredentials("several"), ""),
        (PresentedCredentials("Bearer wrong", ("engine-7",)), ""),
        (PresentedCredentials("Bearer wrong", user=1000), ""),
    ],
)
def test_somebody_is_recognised_by_what_they_show(access: Access, evidence: PresentedCredentials, name: str) -> None:
    found = access.identify(evidence)
    assert found.name == name
    assert bool(found.problem) == (not name)
    if not name:
        assert not any(found.may(verb, "acme/smol") for verb in Verb if verb is not Verb.PROBE)


def test_a_web_token_is_believed_if_its_issuer_has_signed_it_for_this_service(
    access: Access, issuer: TokenIssuer
) -> None:
    assert access.identify(shown(issuer.token("engines:one"))).name == "engine"
    stranger = rsa.generate_private_key(65537, 2048)
    said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "engines:one", "exp": time.time() + 60}
    public = json.loads(issuer.keys.read_text())["keys"][0]
    wrong: dict[str, str] = {
        "expired": issuer.token("engines:one", seconds=-60),
        "for somebody else": issuer.token("engines:one", aud="vault"),
        "of another issuer": issuer.token("engines:one", iss="https://evil.test"),
        "of nobody known": issuer.token("trainers:one"),
        "not yet valid": issuer.token("engines:one", nbf=time.time() + 600),
        "without an end": jwt.encode({**said, "exp": None}, stranger, "RS256", {"kid": "one"}),
        "signed by a stranger": jwt.encode(said, stranger, "RS256", {"kid": "one"}),
        "of an unknown key": issuer.token("engines:one", kid="two"),
        "signed by nobody": jwt.encode(said, "", "none", {"kid": "one"}),
        "signed with the public key as a secret": jwt.encode(said, public["n"], "HS256", {"kid": "one"}),
        "cut off": issuer.token("engines:one")[:-4],
        "too long": issuer.token("engines:one", padding="x" * 20_000),
        "no token": "a.b.c",
    }
    for how, token in wrong.items():
        assert not access.identify(shown(token)).name, how


def _unsigned(*parts: bytes) -> str:
    """A token of these parts, whatever they are."""
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


@pytest.mark.parametrize(
    "token",
    [
        "replica.99999999999.\xe9",
        "replica.\u0661.x",
        "replica..",
        "replica.",
        "replica.9.9.9",
        "\xff\x00",
        _unsigned(b'{"alg":"RS256","kid":"one"}', b"[" * 9000, b"x"),
        _unsigned(b'{"a":' * 1800 + b"1" + b"}" * 1800, b"{}", b"x"),
        _unsigned(b'{"alg":"RS256","kid":{"a":1}}', b'{"iss":"https://issuer.test"}', b"x"),
        _unsigned(b'{"alg":"RS256","kid":"../one","crit":["b64"]}', b'{"iss":["https://issuer.test"]}', b"x"),
        _unsigned(b"\xff\xfe", b"\xff", b"\xff"),
    ],
)
def test_whatever_is_shown_is_answered_with_no(access: Access, token: str) -> None:
    found = access.identify(shown(token))
    assert (found.name, bool(found.problem)) == ("", True)


def test_a_web_token_whose_key_its_issuer_has_withdrawn_is_believed_no_longer(tmp_path: Path) -> None:
    issuer = TokenIssuer(tmp_path / "issuer")
    policy = policy_file(tmp_path, issuer.table, identity("engine", ["pull"], subjects=["test|*"]))
    access, evidence = Access(policy, KEY), shown(issuer.token("one"))
    assert access.identify(evidence).name == access.identify(evidence).name == "engine"
    issuer.keys.write_text(TokenIssuer(tmp_path / "next").keys.read_text())
    os.utime(issuer.keys, (1, 1))
    assert not access.identify(evidence).name


def test_keys_that_cannot_be_read_again_stay_and_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = TokenIssuer(tmp_path / "issuer")
    policy = policy_file(tmp_path, issuer.table, identity("engine", ["pull"], subjects=["test|*"]))
    access, evidence = Access(policy, KEY), shown(issuer.token("one"))
    whole = issuer.keys.read_bytes()
    for damage in (lambda: issuer.keys.write_bytes(whole[:-9]), issuer.keys.unlink):
        caplog.clear()
        damage()
        assert {access.identify(evidence).name for _ in range(5)} == {"engine"}
        told = [each.getMessage() for each in caplog.records if each.name == issuers.log.name]
        assert [each.partition(":")[0] for each in told] == ["keys of test stay as they are"]
    issuer.keys.write_bytes(whole)
    assert access.identify(evidence).name == "engine"


def test_keys_are_not_fetched_from_where_a_redirect_leads_without_tls(tmp_path: Path) -> None:
    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/keys")  # type: ignore[index]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(OSError, match="is not https://"):
            issuers._fetched(f"http://127.0.0.1:{server.server_address[1]}/")
        server.shutdown()


def test_a_policy_that_is_read_again_waits_for_no_server_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(url: str) -> bytes:
        asked.set()
        assert go_on.wait(60)
        raise OSError("away")

    monkeypatch.setattr(issuers, "_fetched", slow)
    path = policy_file(tmp_path, identity("old", ["pull"], token="one"))
    access = Access(path, KEY, look_seconds=0.0)
    issuer = TokenIssuer(tmp_path / "issuer")
    remote = issuer.table.replace(str(issuer.keys), "https://keys.test/jwks")
    path.write_text(remote + identity("new", ["pull"], token="two"))
    os.utime(path, (1, 1))
    assert access.identify(shown("two")).name == "new", "while the server of the keys is silent"
    assert asked.wait(60)
    go_on.set()


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"keys": ' + b"[" * 100_000, b'{"keys": 1}', b"\xff", b'{"keys": []}']
)
def test_what_is_no_set_of_keys_is_refused(raw: bytes, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_bytes(raw)
    ring = KeyRing(Issuer("cluster", ISSUER, AUDIENCE, ("RS256",), str(keys)))
    with pytest.raises(InvalidArgument, match="the keys of cluster"):
        ring.start()


def test_a_web_token_that_was_believed_is_not_after_its_end(access: Access, issuer: TokenIssuer) -> None:
    evidence = shown(issuer.token("engines:one", seconds=-29.0))  # clocks may differ by 30 s
    assert access.identify(evidence).name == "engine"
    eventually(lambda: not access.identify(evidence).name)


def test_a_policy_is_read_again_when_it_changes_and_stays_when_it_is_wrong(tmp_path: Path) -> None:
    path = policy_file(tmp_path, identity("old", ["pull"], token="one"))
    access = Access(path, KEY, look_seconds=0.0)

    def write(text: str, at: int) -> None:
        path.write_text(text)
        os.utime(path, (at, at))

    write(identity("new", ["pull"], token="two"), 1)
    assert access.identify(shown("two")).name == "new"
    assert not access.identify(shown("one")).name
    write("[[identity]]", 2)
    assert access.identify(shown("two")).name == "new"
    path.unlink()
    assert access.identify(shown("two")).name == "new"
    write(identity("third", ["pull"], token="three"), 3)
    assert access.identify(shown("three")).name == "third"


def test_replicas_know_each_other_by_the_secret_of_their_store_for_a_while() -> None:
    now = [1000.0]
    one, other = (Access(Path("/dev/null"), KEY, clock=lambda: now[0]) for _ in range(2))
    stranger = Access(Path("/dev/null"), b"s" * 32, clock=lambda: now[0])
    token = one.replica_token()
    found = other.identify(shown(token))
    assert (found.name, found.may(Verb.REPLICATE), found.may(Verb.PULL, "a/b")) == ("replica", True, False)
    assert not stranger.identify(shown(token)).name
    kind, until, code = token.split(".")
    assert not other.identify(shown(f"{kind}.{int(until) + 1}.{code}")).name
    now[0] += 601
    assert not other.identify(shown(token)).name


def test_without_a_policy_everybody_may_or_whoever_has_a_certificate() -> None:
    assert Access().identify(PresentedCredentials()).may(Verb.MANAGE, "a/b")
    asking = Access(certificates=True)
    assert not asking.identify(PresentedCredentials()).may(Verb.LOOK)
    assert asking.identify(PresentedCredentials(certificate=("x",))).may(Verb.MANAGE, "a/b")


def test_a_ticket_of_the_lane_says_what_was_shown_over_grpc(access: Access) -> None:
    ticket = access.lane_ticket(shown("trainers"))
    assert access.identify(access.shown_by(ticket, 1001)).name == "trainer"
    assert not access.identify(access.shown_by("", 1001)).name
    with pytest.raises(Unavailable):
        access.shown_by("invented", 1000)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "not json"]
)
def test_a_policy_whose_keys_cannot_be_used_is_refused(tmp_path: Path, content: str) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(content)
    table = f'[[issuer]]\nname = "x"\nissuer = "x"\naudience = "x"\nalgorithms = ["RS256"]\nkeys = "{keys}"\n'
    with pytest.raises(InvalidArgument, match="keys"):
        Access(policy_file(tmp_path, table), KEY)


class Server:
    """Keys behind a URL."""

    def __init__(self, content: bytes) -> None:
        self.content: bytes | Exception = content
        self.asked = 0

    def fetch(self, _url: str) -> bytes:
        self.asked += 1
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


def _settled(ring: KeyRing, condition: Callable[[], object]) -> None:
    eventually(lambda: condition() and not ring._asking)


def test_keys_behind_a_url_are_asked_for_at_most_every_ten_seconds_and_kept_when_it_is_away(
    issuer: TokenIssuer,
) -> None:
    now = [0.0]
    server = Server(issuer.keys.read_bytes())
    remote = Issuer("test", ISSUER, AUDIENCE, ("RS256",), "https://issuer.test/keys")
    ring = KeyRing(remote, server.fetch, lambda: now[0])
    ring.start()
    assert ring.key("one") is not None
    for _ in range(50):
        assert ring.key("invented") is None
    assert server.asked == 1
    now[0] = 11.0
    server.content = OSError("away")
    assert ring.key("invented") is None
    _settled(ring, lambda: server.asked == 2)
    assert ring.key("one") is not None
    now[0] = 22.0
    renewed = issuer.keys.read_text().replace('"one"', '"two"')
    server.content = renewed.encode()
    assert ring.key("two") is None
    _settled(ring, lambda: ring.key("two"))


def test_identities_are_the_same_whenever_their_evidence_ends() -> None:
    assert Identity("a", expires=1.0) == Identity("a", expires=2.0)


def test_what_a_policy_says_and_nothing_can_come_of_is_told_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_file(
        tmp_path,
        identity("trainer", ["push:acme/*"], certificates=["trainer-*"], token="trainers"),
        identity("engine", ["pull:acme/*"], users=[1000]),
    )

    def told() -> list[str]:
        return [each for each in caplog.messages if str(policy) in each]

    Access(policy, KEY, certificates=True, lane=True)
    assert told() == []
    bare = Access(policy, KEY, certificates=False, lane=False)
    certificates, users = told()
    assert "certificates of trainer" in certificates
    assert "--client-ca" in certificates
    assert "users of engine" in users
    assert "--local-socket" in users
    assert "--client-ca" in bare.identify(PresentedCredentials()).problem
    assert "--client-ca" not in Access(policy, KEY, certificates=True).identify(PresentedCredentials()).problem
