"""Targets of access: policies, tokens and keys."""

from __future__ import annotations

import base64
import functools
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz import mutators
from tests.fuzz.target import Parse, Target, stateless
from tests.support.identities import AUDIENCE, ISSUER, TokenIssuer
from weighbridge.errors import InvalidArgument
from weighbridge_service.access import issuers
from weighbridge_service.access.access import Access
from weighbridge_service.access.identities import PresentedCredentials
from weighbridge_service.access.issuers import ALGORITHMS, Issuer
from weighbridge_service.access.policy import Policy

_POLICY = b"""
[[identity]]
name = "trainer"
may = ["push:acme/*", "pull:acme/*", "tag:acme/smol@prod"]
tokens = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
certificates = ["spiffe://cluster/ns/rl/sa/trainer"]
users = [1000]
subjects = ["cluster|system:serviceaccount:rl:*"]

[[identity]]
name = "anybody"
anybody = true
may = ["look"]

[[issuer]]
name = "cluster"
issuer = "https://issuer.test"
audience = "weighbridge"
algorithms = ["RS256"]
keys = "/etc/weighbridge/jwks.json"
"""


def _policy(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # `Access` says so
        return
    policy = Policy.parse(text)
    policy.of_certificate(("x", "spiffe://cluster/ns/rl/sa/trainer"))
    policy.of_subject("cluster", "system:serviceaccount:rl:x")


@functools.cache
def _issuer() -> TokenIssuer:
    return TokenIssuer(Path(tempfile.mkdtemp()))


def _tokens() -> list[bytes]:
    issuer = _issuer()
    found = [
        issuer.token("x"),
        issuer.token("y", kid="other"),
        issuer.token("z", seconds=-600),
        issuer.token("x", aud=["a", AUDIENCE]),
    ]
    return [f"Bearer {each}".encode() for each in found] + [
        b"Bearer wb_abc",
        b"Bearer replica.99999999999.abc",
        b"Basic eA==",
    ]


@contextmanager
def _access() -> Iterator[Parse]:
    """Parser of a call's evidence at a service that trusts an issuer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.toml"
        text = _POLICY.decode().replace("/etc/weighbridge/jwks.json", str(_issuer().keys))
        path.write_text(text)
        access = Access(path, b"key")

        def parse(data: bytes) -> None:
            text = data.decode("latin-1")
            identity = access.identify(PresentedCredentials.of_call(text.split("\n"), ()))
            assert identity.name in ("", "trainer", "anybody"), identity

        assert ISSUER in text
        yield parse


def _token(choose: random.Random, data: bytes) -> bytes:
    """Change the parts of a web token, most often what its JSON says, and not how it is signed."""
    scheme, _, token = data.partition(b" ")
    parts = token.split(b".")
    if len(parts) != 3 or choose.random() < 0.2:
        return mutators.raw(choose, data)
    which = choose.choice((0, 1, 1))
    try:
        text = base64.urlsafe_b64decode(parts[which] + b"==")
    except ValueError:
        return mutators.raw(choose, data)
    parts[which] = base64.urlsafe_b64encode(_CLAIMS(choose, text)).rstrip(b"=")
    return scheme + b" " + b".".join(parts)


_CLAIMS = mutators.json_documents(
    texts=(
        "alg",
        "none",
        "HS256",
        "RS256",
        "kid",
        "one",
        "iss",
        ISSUER,
        "aud",
        AUDIENCE,
        "exp",
        "sub",
        "crit",
        "b64",
        "zip",
    )
)
_TRUSTED = Issuer("cluster", ISSUER, AUDIENCE, ALGORITHMS, "https://issuer.test/keys")


def _keys() -> list[bytes]:
    rsa = json.loads(_issuer().keys.read_bytes())["keys"][0]
    curve = {
        "kty": "EC",
        "crv": "P-256",
        "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
        "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
        "kid": "e",
    }
    edwards = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "o"}
    shared = {"kty": "oct", "k": "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ", "kid": "s"}
    return [json.dumps({"keys": keys}).encode() for keys in ([rsa], [curve, edwards], [shared, rsa])]


def _web_token(header: bytes, claims: bytes) -> bytes:
    return b"Bearer " + b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, claims, b"x"))


def _heavy_tokens() -> list[bytes]:
    header = b'{"alg":"RS256","kid":"one"}'
    nested = b"[" * 9000
    return [
        _web_token(header, nested), _web_token(nested, b"{}"), _web_token(header, b'{"iss":' + nested), _web_token(header, b'{"exp":' + b"9" * 5000 + b"}"),
        b"Bearer " + b"." * 1_000_000, b"Bearer " + b"a" * 1_000_000, b"Bearer replica." + b"9" * 100_000 + b".x",
        _web_token(b'{"alg":"RS256","kid":' + b"[" * 5000 + b"]" * 5000 + b"}", b"{}"),
    ]  # fmt: skip


TARGETS = (
    Target(
        "policies",
        stateless(_policy),
        lambda: [_POLICY],
        mutators.texts(
            "[[identity]]", "[[issuer]]", "name", "=", "[", "]", "{", "}", '"', '"""', "may", "tokens", "sha256:", "users", "subjects", "|", "true", "1e9", "nan",
            "1979-05-27", "0x", ".", "\n", "'", "\\u0000", "9" * 5000, "[" * 2000, "a." * 2000,
        ),
        (InvalidArgument,),
        lambda: [b"x=" + b"[" * 100_000, b"a." * 2_000 + b"b=1", b"x=" + b"9" * 100_000, b"x=" + b"{a=" * 50_000, b'x="' + b"a" * 3_000_000 + b'"'],
        longest=4096,  # tomllib's time for dotted keys grows with their square, and the operator writes the policy
        weight=0.3,
    ),
    Target("tokens", _access, _tokens, mutators.one_of(_token, _token, mutators.raw), (), _heavy_tokens, longest=1 << 15, weight=0.3),
    Target(
        "key-sets",
        stateless(lambda data: issuers._keys_in(data, _TRUSTED)),
        _keys,
        mutators.json_documents(texts=("kty", "RSA", "EC", "OKP", "oct", "crv", "P-256", "P-521", "Ed448", "n", "e", "x", "y", "d", "AQAB", "alg", "RS256", "use")),
        (InvalidArgument,),
        lambda: [b"[" * 1_000_000, b'{"keys":' + b"[" * 1_000_000, b'{"keys":[' + b'{"kty":"oct","k":"x"},' * 20_000 + b'{}]}'],
        weight=0.3,
    ),
)  # fmt: skip
