"""Does a store on S3 keep what it promises beyond other stores: parts, bounded memory, nothing left behind, clear
errors?
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from tests.support.s3_server import SECRET_KEY, S3Server
from weighbridge.errors import (
    Conflict,
    DataLoss,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import IfMatch, PutMode
from weighbridge_storage.stores.s3.client import ObjectState
from weighbridge_storage.stores.s3.errors import s3_error
from weighbridge_storage.stores.s3.parts import PartReader, PartsBudget, part_size
from weighbridge_storage.stores.s3.settings import (
    LARGEST_PART,
    MOST_PARTS,
    SMALLEST_PART,
    S3Settings,
    parse_location,
)
from weighbridge_storage.stores.s3.store import S3Store
from weighbridge_storage.stores.s3.uploads import decide

REPOSITORY = Path(__file__).parents[3]
MIB = 1 << 20


@pytest.fixture
def settings(seaweed: S3Server) -> S3Settings:
    return seaweed.settings(part_bytes=SMALLEST_PART)


@pytest.fixture
def store(settings: S3Settings) -> Iterator[S3Store]:
    opened = S3Store(settings)
    yield opened
    opened.close()


def unfinished(store: S3Store) -> int:
    return len(list(store._client.uploads(store._prefix)))


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [SMALLEST_PART - 1, SMALLEST_PART, SMALLEST_PART + 1, 3 * SMALLEST_PART])
@pytest.mark.parametrize("streamed", [True, False])
def test_objects_of_any_number_of_parts_are_whole(store: S3Store, nbytes: int, streamed: bool) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    pieces = (data[start : start + 999_999] for start in range(0, nbytes, 999_999))
    etag = store.put("k", pieces if streamed else data, mode="create")
    content, found = store.get("k")
    assert (content, found) == (data.tobytes(), etag)
    assert b"".join(store.stream("k")) == data.tobytes()
    assert unfinished(store) == 0


def test_a_buffer_that_is_used_again_for_each_piece_is_copied_in_time(store: S3Store) -> None:
    buffer = bytearray(MIB)

    def data() -> Iterator[bytearray]:
        for value in range(12):
            buffer[:] = bytes([value]) * MIB
            yield buffer

    store.put("k", data(), mode="create")
    assert store.get("k")[0] == b"".join(bytes([value]) * MIB for value in range(12))


def test_conditions_hold_for_objects_of_many_parts(store: S3Store) -> None:
    large = [b"x" * SMALLEST_PART, b"y"]
    first = store.put("k", large, mode="create")
    for mode in ("create", IfMatch('"another"')):
        with pytest.raises(Conflict):
            store.put("k", [b"z" * SMALLEST_PART, b"z"], mode=mode)
    with pytest.raises(Conflict):
        store.put("missing", large, mode=IfMatch(first))
    assert store.get("k")[1] == first
    store.put("k", [b"z" * SMALLEST_PART, b"z"], mode=IfMatch(first))
    assert store.get("k")[0] == b"z" * (SMALLEST_PART + 1)
    assert unfinished(store) == 0


def test_an_upload_whose_data_ends_in_an_exception_leaves_nothing(store: S3Store) -> None:
    class Broken(Exception):
        pass

    def data() -> Iterator[bytes]:
        yield b"x" * (2 * SMALLEST_PART)
        assert unfinished(store) == 1
        raise Broken

    with pytest.raises(Broken):
        store.put("k", data(), mode="create")
    with pytest.raises(NotFound):
        store.size("k")
    assert unfinished(store) == 0


def test_an_upload_of_which_a_part_fails_stops_and_leaves_nothing(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = 0

    def data() -> Iterator[bytes]:
        nonlocal given
        while given < 100:
            given += 1
            yield bytes(SMALLEST_PART)

    def fail(*_: object) -> None:
        raise EndpointConnectionError(endpoint_url="http://nowhere")

    monkeypatch.setattr(store._client, "upload_part", fail)
    for _ in range(3):
        given = 0
        with pytest.raises(Unavailable, match="writing k failed"):
            store.put("k", data(), mode="create")
        assert given < 50
    assert unfinished(store) == 0
    monkeypatch.undo()
    store.put("k", [bytes(SMALLEST_PART)] * 2, mode="create")  # all room has been given back


def test_only_uploads_of_the_age_and_prefix_that_are_named_are_aborted(store: S3Store, settings: S3Settings) -> None:
    for key in ("a/1", "a/2", "b/1"):
        store._client.begin_upload(f"{settings.prefix}{key}", "w", checksums=True)
    other = S3Store(dataclasses.replace(settings, prefix=f"{settings.prefix}c/"))
    other._client.begin_upload(f"{settings.prefix}c/x", "w", checksums=True)
    assert store.discard_unfinished("a/", older_than_s=600) == 0
    assert store.discard_unfinished("a/", older_than_s=0) == 2
    assert other.discard_unfinished("", older_than_s=0) == 1
    assert unfinished(store) == 1
    assert store.discard_unfinished("", older_than_s=0) == 1
    other.close()


def test_a_listing_of_many_pages_has_everything_once(settings: S3Settings) -> None:
    store = S3Store(dataclasses.replace(settings, page=3))
    keys = {f"many/{number % 5}/{number}" for number in range(20)}
    for key in keys:
        store.put(key, b"", mode="create")
        store._client.begin_upload(f"{settings.prefix}{key}", "w", checksums=True)
    assert sorted(store.list("many/")) == sorted(keys)
    assert sorted(store.folders("many/")) == ["0", "1", "2", "3", "4"]
    assert store.discard_unfinished("many/", older_than_s=0) == 20
    assert unfinished(store) == 0
    store.close()


def test_a_large_object_is_copied_in_parts(settings: S3Settings) -> None:
    store = S3Store(dataclasses.replace(settings, single_copy_bytes=SMALLEST_PART))
    data = np.random.default_rng(1).integers(0, 256, 3 * SMALLEST_PART + 1, dtype=np.uint8)
    store.put("a", data, mode="create")
    store.put("b", b"old", mode="create")
    store.copy("a", "b")
    assert b"".join(store.stream("b")) == data.tobytes()
    with pytest.raises(NotFound):
        store.copy("missing", "b")
    assert unfinished(store) == 0
    store.close()


def test_a_copy_whose_source_changes_under_it_is_begun_again(
    settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(dataclasses.replace(settings, single_copy_bytes=SMALLEST_PART))
    store.put("a", b"1" * (2 * SMALLEST_PART), mode="create")
    real = store._client.copy_part
    changed = threading.Event()

    def change_first(*arguments: Any) -> Any:
        if not changed.is_set():
            changed.set()
            store._client.put(arguments[3], b"2" * (2 * SMALLEST_PART), "w", "overwrite")
        return real(*arguments)

    monkeypatch.setattr(store._client, "copy_part", change_first)
    store.copy("a", "b")
    assert store.get("b")[0] == b"2" * (2 * SMALLEST_PART)
    assert unfinished(store) == 0
    store.close()


def test_an_object_that_is_replaced_while_it_is_streamed_is_an_error_and_no_mixture(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"1" * (20 * MIB), mode="create")
    real = store._client.get_range

    def replace_then_read(name: str, start: int, length: int, etag: str | None) -> Any:
        if start:
            store.put("k", b"2" * (20 * MIB), mode="overwrite")
        return real(name, start, length, etag)

    monkeypatch.setattr(store._client, "get_range", replace_then_read)
    came: list[bytes] = []
    with pytest.raises(Unavailable, match="replaced"):
        came.extend(store.stream("k"))
    assert set(b"".join(came)) <= {ord("1")}


MEASURE = f"""
import sys
from weighbridge_storage.stores.s3.store import S3Store
from weighbridge_storage.stores.s3.settings import parse_location, SMALLEST_PART
import dataclasses
def memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
settings = dataclasses.replace(
    parse_location(sys.argv[1]), part_bytes=SMALLEST_PART, memory_bytes=4 * SMALLEST_PART, parallel=8
)
store = S3Store(settings)
store.put("warm", [b"x" * SMALLEST_PART, b"x"], mode="create")
before = memory("VmRSS")
piece = bytes({MIB})
store.put("k", (piece for _ in range(192)), mode="create")
print(store.size("k"), memory("VmHWM") - before)
store.close()
"""


@pytest.mark.process
def test_memory_stays_within_the_bound_whatever_the_size(seaweed: S3Server) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "MALLOC_ARENA_MAX": "2",
    }
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, seaweed.location()],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    size, grown = map(int, out.split())
    assert size == 192 * MIB
    assert grown < 4 * SMALLEST_PART + 12 * MIB, f"{grown / MIB:.0f} MiB for 20 MiB of parts"


def test_parts_grow_so_that_the_largest_object_fits_into_their_number() -> None:
    sent = 0
    for _ in range(MOST_PARTS):
        size = part_size(sent, None, 16 * MIB)
        assert 16 * MIB <= size <= LARGEST_PART
        sent += size
    assert sent > 5 << 40
    for total in (1, 16 * MIB, 50 * 10**9, 5 << 40):
        size = part_size(0, total, 16 * MIB)
        assert size <= LARGEST_PART
        assert size * MOST_PARTS >= total
    assert part_size(20 << 30, None, 16 * MIB) == 16 * MIB


def test_a_part_waits_until_there_is_room_for_it() -> None:
    budget = PartsBudget(10)
    first = PartReader(b"1234567", 10, budget).next()
    second: list[bytearray] = []
    waiting = threading.Thread(target=lambda: second.append(PartReader(b"12345", 10, budget).next().body))
    waiting.start()
    waiting.join(0.1)
    assert second == []
    first.release()
    first.release()
    waiting.join(60)
    assert second == [bytearray(b"12345")]


def test_one_part_larger_than_the_bound_goes_alone() -> None:
    budget = PartsBudget(10)
    part = PartReader([b"x" * 100], 50, budget).next()
    assert len(part.body) == 50
    part.release()


# --- outcomes and errors ----------------------------------------------------------------------------------------------


def answer(status: int, code: str = "", retries: int = 0, message: str = "m") -> ClientError:
    response: Any = {
        "Error": {"Code": code or str(status), "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": retries},
    }
    return ClientError(response, "PutObject")


TIMEOUT = ReadTimeoutError(endpoint_url="http://x")
OURS, THEIRS = ObjectState(1, '"a"', "ours", 0), ObjectState(1, '"b"', "theirs", 0)


@pytest.mark.parametrize(
    ("error", "found", "mode", "expected"),
    [
        (answer(412), OURS, "create", "written"),
        (TIMEOUT, OURS, "create", "written"),
        (answer(404, "NoSuchUpload", 1), OURS, "overwrite", "written"),
        (answer(412), THEIRS, "create", "conflict"),
        (answer(412), None, "create", "conflict"),
        (answer(412, "PreconditionFailed", 1), THEIRS, "create", "unknown"),
        (answer(404, "NoSuchKey"), None, IfMatch('"b"'), "conflict"),
        (answer(404, "NoSuchBucket"), None, IfMatch('"b"'), "failed"),
        (answer(409), None, "create", "nothing"),
        (answer(409), THEIRS, "create", "conflict"),
        (answer(409), THEIRS, IfMatch('"b"'), "nothing"),
        (answer(409), THEIRS, IfMatch('"c"'), "conflict"),
        (TIMEOUT, None, "create", "unknown"),
        (TIMEOUT, THEIRS, IfMatch('"b"'), "unknown"),
        (answer(500), THEIRS, "overwrite", "unknown"),
        (answer(503, "SlowDown"), None, "create", "unknown"),
        (answer(403, "AccessDenied"), None, "create", "failed"),
        (answer(403, "ExpiredToken", 2), None, "create", "unknown"),
        (NoCredentialsError(), None, "create", "failed"),
    ],
)
def test_what_came_of_a_write_follows_from_what_is_found(
    error: Exception, found: ObjectState | None, mode: PutMode, expected: str
) -> None:
    assert decide(error, found, "ours", mode) == expected


@pytest.mark.parametrize(
    ("error", "expected", "word"),
    [
        (answer(404, "NoSuchKey"), NotFound, "no such object"),
        (answer(404), NotFound, "no such object"),
        (answer(404, "NoSuchBucket"), Unavailable, "bucket does not exist"),
        (answer(412), Conflict, "another writer"),
        (answer(400, "BadDigest"), DataLoss, "corrupted in transit"),
        (answer(507), ResourceExhausted, "507"),
        (answer(403, "QuotaExceeded"), ResourceExhausted, "QuotaExceeded"),
        (answer(403, "AccessDenied"), Unavailable, "AccessDenied"),
        (answer(301, "PermanentRedirect"), Unavailable, "region"),
        (answer(400, "AuthorizationHeaderMalformed"), Unavailable, "region"),
        (answer(503, "SlowDown"), Unavailable, "SlowDown"),
        (answer(500), Unavailable, "500"),
        (answer(400, "EntityTooLarge"), InvalidArgument, "EntityTooLarge"),
        (NoCredentialsError(), Unavailable, "AWS_ACCESS_KEY_ID"),
        (EndpointConnectionError(endpoint_url="http://x:1"), Unavailable, "http://x:1"),
    ],
)
def test_every_failure_of_a_server_is_an_error_that_says_what_to_do(
    error: Exception, expected: type[WeighbridgeError], word: str
) -> None:
    found = s3_error(error, "writing k")
    assert type(found) is expected
    assert found.message.startswith("writing k failed")
    assert word in str(found)
    assert found.fix or expected is NotFound
    assert len(str(s3_error(answer(500, message="x\n" * 5000), "writing k"))) < 500


def test_wrong_credentials_are_said_so_and_not_shown(settings: S3Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-private")
    store = S3Store(settings)
    for use in (
        lambda: store.get("k"),
        lambda: store.put("k", b"", mode="create"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(Unavailable, match="credentials") as caught:
            use()
        assert "wrong-and-private" not in str(caught.value)
        assert SECRET_KEY not in str(caught.value)
    store.close()


def test_a_bucket_that_is_not_there_is_said_so(settings: S3Settings) -> None:
    store = S3Store(dataclasses.replace(settings, bucket="no-such-bucket"))
    for use in (lambda: store.get("k"), lambda: list(store.list(""))):
        with pytest.raises(Unavailable, match="bucket does not exist"):
            use()
    store.close()


def test_keys_too_long_with_the_prefix_are_refused(settings: S3Settings) -> None:
    store = S3Store(dataclasses.replace(settings, prefix="p/" * 100))
    with pytest.raises(InvalidArgument, match="1024 bytes"):
        store.get("/".join(["x" * 200] * 5))
    store.close()


def test_two_prefixes_of_a_bucket_are_two_stores(store: S3Store, settings: S3Settings) -> None:
    other = S3Store(dataclasses.replace(settings, prefix=f"{settings.prefix[:-1]}-other/"))
    store.put("k", b"mine", mode="create")
    other.put("k", b"theirs", mode="create")
    assert store.get("k")[0] == b"mine"
    assert (list(store.list("")), list(other.list(""))) == (["k"], ["k"])
    other.close()


# --- locations --------------------------------------------------------------------------------------------------------


def test_a_location_says_where_a_store_is(tmp_path: Path) -> None:
    found = parse_location("s3://b/some/pre%20fix/?endpoint=http%3A%2F%2Fh:1&region=eu-1&addressing=virtual")
    assert found == S3Settings("b", "some/pre fix/", "http://h:1", "eu-1", "virtual")
    assert parse_location("s3://b") == S3Settings("b")
    assert str(found) == "s3://b/some/pre fix/"
    opened = open_store(tmp_path / "folder")
    assert isinstance(opened, LocalStore)
    opened.close()


@pytest.mark.parametrize(
    "location",
    [
        "s3://", "s3:///x", "s3://b/../c", "s3://b/.hidden", "s3://b?endpoint=h:1", "s3://b?endpoint=ftp://h",
        "s3://b?endpoint=", "s3://b?addressing=both", "s3://b?x=1", "s3://b?region", "s3://b#x", "s3://key:secret@b/x",
        "s3://b?endpoint=http://key:secret@h", "s3://b?public_endpoint=http://key:secret@h", "s3://b?endpoint=http://h/?x=1", "s3://b?endpoint=http://h:99999",
    ],
)  # fmt: skip
def test_what_is_no_location_is_refused_without_repeating_secrets(location: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_store(location)
    assert "secret" not in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("addressing", "endpoint", "expected"),
    [
        ("auto", None, "https://bucket.s3.amazonaws.com/k"),
        ("path", None, "https://s3.eu-west-1.amazonaws.com/bucket/k"),
        ("auto", "https://store.example:9000", "https://store.example:9000/bucket/k"),
        ("virtual", "https://store.example:9000", "https://bucket.store.example:9000/k"),
    ],
)
def test_a_bucket_is_addressed_as_asked_for_and_signed_with_sigv4(
    aws_environment: None, addressing: Any, endpoint: str | None, expected: str
) -> None:
    here = S3Settings("bucket", endpoint=endpoint, region="eu-west-1", addressing=addressing)
    elsewhere = dataclasses.replace(here, endpoint="http://10.0.0.1:8333", public_endpoint=endpoint)
    for settings in (here, elsewhere) if endpoint else (here,):
        store = S3Store(settings)
        url = store.presigned_url("k", 60)
        assert url.partition("?")[0] == expected
        assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in url
        assert "X-Amz-Expires=60" in url
        assert "eu-west-1" in url
        assert SECRET_KEY not in url
        store.close()


def test_a_presigned_url_gives_the_object_or_a_range_of_it_and_nothing_else(store: S3Store) -> None:
    store.put("k", b"0123456789", mode="create")
    url = store.presigned_url("k", 60)
    assert httpx.get(url).content == b"0123456789"
    part = httpx.get(url, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    assert httpx.put(url, content=b"x").status_code == 403
    assert httpx.get(url.replace("/k?", "/l?")).status_code == 403
    assert httpx.get(store.presigned_url("nothing", 60)).status_code == 404


def test_region_and_endpoint_come_from_the_environment(aws_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere:1234")
    store = S3Store(S3Settings("bucket"))
    assert store._client._s3.meta.region_name == "eu-north-1"
    assert store._client._s3.meta.endpoint_url == "http://elsewhere:1234"
    store.close()


@pytest.mark.process
def test_a_local_store_is_opened_without_boto3(tmp_path: Path) -> None:
    script = (
        "import sys; from weighbridge_storage.opening import open_store; open_store(sys.argv[1]).close(); "
        "from weighbridge_service.runtime.config import ServiceConfig; assert 'boto3' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], env=environment, cwd=REPOSITORY, check=True)
