"""Fuzzed HTTP requests: a seeded generator of what a faulty or hostile client may send, as the bytes of its connection:
they need not be HTTP.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

MODEL = "acme/fuzzed"
_PATHS = (
    "/v1/models", "/v1/models/{m}", "/v1/models/{m}/versions", "/v1/models/{m}/versions/{v}", "/v1/models/{m}/versions/{v}/verify",
    "/v1/models/{m}/retention", "/v1/models/{m}/collect", "/v1/models/{m}/refs", "/v1/models/{m}/refs/{v}", "/v1/exports",
    "/v1/exports/{j}", "/v1/exports/{j}/events", "/livez", "/readyz", "/readyz/{v}", "/v1/memory", "/v1/checks", "/metrics", "/docs",
    "/openapi.json", "/api/models/{m}", "/api/models/{m}/revision/{v}", "/api/models/{m}/tree/{v}", "/api/models/{m}/paths-info/{v}",
    "/api/models/{m}/refs", "/{m}/resolve/{v}/{f}", "/{m}/resolve/{v}/", "/api/models",
)  # fmt: skip
_MODELS = (MODEL,) * 8 + (
    "a/b",
    "a/b/c",
    "../..",
    "%2e%2e/%2e%2e",
    "a%00/b",
    "%ff%fe/x",
    "é/x",
    "a" * 3000 + "/b",
    "/",
    "acme%2ffuzzed",
)
_VERSIONS = (
    "latest",
    "main",
    "1",
    "2",
    "live",
    "prod",
    "0",
    "-1",
    "9" * 40,
    "%D9%A3",
    "..",
    "%00",
    "a%2fb",
    "x" * 3000,
    "",
)
_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "../head.json",
    "%2e%2e%2fhead.json",
    "x",
    "a%00",
)
_JOBS = ("0" * 32, "f" * 31, "x", "%00")
_METHODS = ("GET",) * 6 + (
    "HEAD",
    "POST",
    "POST",
    "POST",
    "PUT",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "X",
)
_QUERIES = (
    "", "", "", "limit=0", "limit=3", "limit=%D9%A3", "limit=1e3", "limit=" + "9" * 5000, "after=%ff", "after=a/b", "before=-1", "before=2",
    "include_invisible=maybe", "recursive=true", "expand=1", "cursor=%00", "cursor=Zm9v", "a=b&" * 500, "=&&=;", "blobs=true",
)  # fmt: skip
_HEADERS = (
    "Range: bytes=0-9", "Range: bytes=5-", "Range: bytes=-5", "Range: bytes=-", "Range: bytes=9-0", "Range: bytes=" + "9" * 500 + "-",
    "Range: bytes=\xb2-", "Range: lines=1", "Range: bytes=0-0," * 300, "If-None-Match: *", 'If-None-Match: W/"x"', "If-Range: x",
    "If-Modified-Since: never", "Origin: http://[", "Origin: null", "Origin: http://x:99999999", "Origin: \xff", "Host: [", "Host: a:b:c",
    "Host: attacker.com", "Host: ", "Content-Type: text/plain", "Content-Type: application/json; charset=\xff", "Content-Type: x/" + "y" * 900,
    "Content-Type: multipart/form-data", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999", "Content-Length: \xb2",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Expect: 100-continue", "Upgrade: websocket", "Accept: \0", "Accept-Encoding: \xff",
    "Last-Event-ID: \xff", "Cookie: " + "x" * 7000, "X: " + "y" * 70_000, "no colon", ": no name", " folded: x", "User-Agent: huggingface/\xff",
)  # fmt: skip
_VALUES = (
    None, True, 0, -1, 1, 2**53, 2**53 + 1, 2**64, 10**400, 1.5, 1e308, "", "x", "latest", "1", MODEL, "..", "/etc", "a/b", "\0", "\ud800",
    "🚂", "x" * 5000, "bf16", [], {}, [[]], {"": {}}, [0] * 1000,
)  # fmt: skip
_FIELDS = (
    "model", "version", "folder", "dtype", "max_shard_bytes", "keep_last", "keep_every", "keep_younger_s", "dry_run", "paths", "expand", "x",
)  # fmt: skip
_BODIES = (
    b"", b"{}", b"[]", b"null", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'"\\ud800"', b'{"version": ' + b"9" * 6000 + b"}",
    b'{"model": "\\ud800/x"}', b"NaN", b'{"keep_last": NaN}', b'{"version": "1", "version": "2"}', b"a=b", b"x" * ((1 << 20) + 1),
)  # fmt: skip


def requests(seed: int) -> Iterator[bytes]:
    """Requests, as they go over a connection; the same seed gives the same ones."""
    choose = random.Random(seed)
    while True:
        path = choose.choice(_PATHS)
        for part, values in {"{m}": _MODELS, "{v}": _VERSIONS, "{f}": _FILES, "{j}": _JOBS}.items():
            path = path.replace(part, choose.choice(values))
        query = choose.choice(_QUERIES)
        method = choose.choice(_METHODS)
        headers = ["Host: localhost", "Connection: close"]
        headers += choose.choices(_HEADERS, k=choose.choice((0, 0, 1, 1, 2, 4)))
        body = b""
        if method in ("POST", "PUT", "PATCH", "DELETE"):
            body = _body(choose)
            headers += ["Content-Type: application/json"] * (choose.random() < 0.8)
            headers += [f"Content-Length: {len(body)}"] * (choose.random() < 0.95)
        head = f"{method} {path}{'?' * bool(query)}{query} HTTP/1.1"
        raw = "\r\n".join([head, *headers, "", ""]).encode("latin-1", "replace") + body
        yield _damaged(choose, raw) if choose.random() < 0.1 else raw


def _body(choose: random.Random) -> bytes:
    if choose.random() < 0.3:
        return choose.choice(_BODIES)
    fields = {choose.choice(_FIELDS): choose.choice(_VALUES) for _ in range(choose.randrange(5))}
    if choose.random() < 0.5:
        fields["model"] = MODEL
    return json.dumps(fields).encode()


def _damaged(choose: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw[:5000])
    for _ in range(choose.choice((1, 3, 20))):
        where = choose.randrange(len(data))
        data[where : where + choose.randrange(3)] = choose.randbytes(choose.randrange(4))
    return bytes(data)
