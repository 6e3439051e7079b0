"""Targets that are texts: what is typed, and what stands in URLs, headers and scopes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from starlette.datastructures import Headers

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Target, stateless
from weighbridge._cli.parsing import parse_duration, parse_size
from weighbridge._core import dtypes
from weighbridge._core.metadata import checked_metadata, conditions, parse_value
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.references import Reference, parse_reference
from weighbridge._transport.addresses import Addresses
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge_service.access.scopes import Scope, matches
from weighbridge_service.api.http.guard import HostNames, refusal
from weighbridge_service.api.http.hub_documents import RequestedFile
from weighbridge_service.api.http.ranges import RangeNotSatisfiable, byte_range
from weighbridge_storage.documents import names
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.s3.settings import parse_location

_SMALL = Bounds(seconds=0.5, seconds_per_mb=2.0)


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """A parser of texts, for whatever bytes."""
    return lambda data: parse(data.decode("utf-8", "surrogateescape"))


def _condition(text: str) -> None:
    for found in conditions(text.split("\n")[:40]):
        for value in ("x", 1, 1.5, True, "1", "nan", "true"):
            found.holds({found.key: value})
    with contextlib.suppress(InvalidArgument):
        checked_metadata({"key": parse_value(text)})


def _reference(text: str) -> None:
    for need_version in (True, False):
        found = parse_reference(text, need_version=need_version)
        ModelName.parse(found.model)
        for read in (lambda found=found: found.number, lambda: Reference.of(text, 17)):
            with contextlib.suppress(InvalidArgument):
                read()


def _name(text: str) -> None:
    checks: tuple[Callable[[str], object], ...] = (
        ModelName.parse, names.check_ref_name, names.check_version_file_name, names.check_file_name, names.check_files_id, names.check_node_name,
        functools.partial(names.numbered_key, ModelName("acme", "smol")), functools.partial(names.node_of_key, ModelName("acme", "smol")),
        functools.partial(names.registered_files_of, ModelName("acme", "smol")), names.first_version_of, dtypes.parse, dtypes.from_safetensors,
        parse_size, parse_duration, parse_location, Addresses.of,
    )  # fmt: skip
    for check in checks:
        with contextlib.suppress(WeighbridgeError):
            check(text)


def _scope(text: str) -> None:
    first, _, rest = text.partition("\n")
    matches(first, rest)
    scope = Scope.parse(first)
    model, _, ref = rest.partition("@")
    for verb in Verb:
        scope.allows(verb, model, ref)


def _range(text: str) -> None:
    for size in (0, 1, 1000, 2**40):
        try:
            found = byte_range(text, size)
        except RangeNotSatisfiable:
            continue
        assert 0 <= found.start <= found.end <= size, found


_NAMES = HostNames.of(("weights.test",))


def _host(text: str) -> None:
    host, _, origin = text.partition("\n")
    raw = [(b"host", host.encode("latin-1", "replace")), (b"origin", origin.encode("latin-1", "replace"))]
    refusal("POST", Headers(raw=raw), _NAMES)


TARGETS = (
    Target(
        "conditions",
        stateless(_text(_condition)),
        lambda: [b"reward>=0.7", b"run = x\nstep!=3", b'a/b.c == "quoted"', b"flag=true\nother<1e9"],
        mutators.texts(">=", "<=", "!=", "==", "=", "<", ">", "reward", "NaN", "1e999", "true", '"', "[", " ", "\n"),
        (InvalidArgument,),
        lambda: [b" " * 3_000_000, b"a" + b" " * 3000 + b"=" + b" " * 1000, b"[" * 4000, b"a=" + b"[" * 4000, b"a=" + b"9" * 4090],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "references",
        stateless(_text(_reference)),
        lambda: [b"acme/smol@17", b"acme/smol@latest", b"a.b-c_d/e@v1.0"],
        mutators.texts("@", "/", "acme", "smol", "17", "0", "latest", "--", "..", ".git"),
        (InvalidArgument,),
        lambda: [b"a" * 1_000_000 + b"/b@1", b"a/b@" + b"1" * 1_000_000, b"a/b@" + b"9" * 30, b"@" * 1_000_000],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "names",
        stateless(_text(_name)),
        lambda: [
            b"acme/smol", b"models/acme/smol/versions/000000000017/x", b"0000000000000001-" + b"a" * 64, b"5GB", b"1.5GiB", b"7d", b"bf16", b"F8_E4M3",
            b"models/acme/smol/files/7-abc/config.json", b"model-00001-of-00002.safetensors", b"s3://bucket/prefix?region=x", b"127.0.0.1:1,[::1]:2",
        ],
        mutators.texts("models/acme/smol/", "versions/", "leases/", "files/", "history/", ".json", "-", "GiB", "s3://", "?", "&", "=", ":", ","),
        (WeighbridgeError,),
        lambda: [b"a" * 1_000_000, b"-" * 1_000_000, b"9" * 100_000, b"a/" * 300_000, b"s3://" + b"a" * 300_000, b"x:1," * 100_000],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "scopes",
        stateless(_text(_scope)),
        lambda: [b"pull:acme/*\nacme/smol", b"tag:acme/*@v*-*\nacme/smol@v1-2", b"admin\nx", b"observe\n"],
        mutators.texts("*", ":", "@", "/", "pull", "push", "tag", "admin", "observe", "a", "\n"),
        (InvalidArgument,),
        lambda: [b"pull:" + b"a*" * 2000 + b"b\n" + b"a" * 20_000, b"pull:" + b"*" * 5000 + b"\n" + b"a" * 100_000],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "ranges",
        stateless(_text(_range)),
        lambda: [b"bytes=0-9", b"bytes=5-", b"bytes=-5", b" Bytes = 1 - 2 "],
        mutators.texts("bytes", "=", "-", " ", "0", "9", "99999999999999999999", ",", "\u0663"),
        (),
        lambda: [b" " * 1_000_000, b"bytes=" + b"9" * 1_000_000 + b"-", b"bytes=" + b"0" * 1_000_000 + b"1-"],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "hub-paths",
        stateless(_text(RequestedFile.of)),
        lambda: [b"/acme/smol/resolve/main/config.json", b"/acme/smol/resolve/refs%2Fpr%2F1/a/b", b"/a/b/tree/17/"],
        mutators.texts("/", "%2F", "%", "%00", "%ff", "resolve", "main", "..", "//"),
        (WeighbridgeError,),
        lambda: [b"/" * 1_000_000, b"%2F" * 300_000, b"%" * 300_000],
        _SMALL,
        weight=2.0,
    ),
    Target(
        "hosts",
        stateless(_text(_host)),
        lambda: [b"localhost:8080\nhttp://localhost:8080", b"[::1]:1\nnull", b"weights.test\nhttps://weights.test", b"10.0.0.1\n"],
        mutators.texts("[", "]", ":", "//", "http://", "@", ".", "localhost", "%", "xn--", "\u2100"),
        (),
        lambda: [b"[" * 100_000, b"a." * 100_000, b"1." * 100_000 + b"\n" + b"http://" * 10_000],
        _SMALL,
        weight=2.0,
    ),
)  # fmt: skip
