"""Are files, ranges and names of the Hub endpoint answered as HTTP says, and hostile ones refused?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore, Thread
from typing import Any

import pytest

from tests.service.api.http.hub.endpoint import MODEL, WEIGHTS, Endpoint, endpoint_of, files_of
from tests.support.waiting import eventually
from weighbridge_service.admission.piece_room import SMALLEST_BYTES
from weighbridge_service.api.http.bodies import MAX_BODY_BYTES
from weighbridge_service.api.http.hub_documents import HubVersion
from weighbridge_service.api.http.hub_reading import Hub
from weighbridge_service.api.http.hub_routes import HubSizes
from weighbridge_storage.memory.read_checks import ReadChecks
from weighbridge_storage.versions.manifest import FileEntry


def test_downloads_that_wait_for_the_store_keep_no_thread_from_other_requests(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, reading = Event(), Semaphore(0)
    read = Hub.read

    def hanging(*arguments: Any) -> bytes:
        reading.release()
        go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(Hub, "read", hanging)
    url = f"/{MODEL}/resolve/main/{WEIGHTS}"
    with ThreadPoolExecutor(60) as clients:
        try:
            downloads = [clients.submit(endpoint.http.get, url, timeout=60) for _ in range(60)]
            for _ in range(40):
                assert reading.acquire(timeout=30)
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/livez", "/metrics"):
                assert endpoint.http.get(path, timeout=60).status_code == 200
        finally:
            go_on.set()
        assert [each.result().status_code for each in downloads] == [200] * 60


def test_head_and_get_agree(endpoint: Endpoint) -> None:
    for path in files_of(endpoint.folder(1)):
        url = f"/{MODEL}/resolve/1/{path.name}"
        head, get = endpoint.http.head(url), endpoint.http.get(url)
        assert (head.status_code, head.content) == (200, b"")
        assert (get.status_code, get.content) == (200, path.read_bytes())
        for name in ("etag", "content-length", "x-repo-commit", "accept-ranges"):
            assert head.headers[name] == get.headers[name]
        assert head.headers["x-repo-commit"] == endpoint.sha("1")
    etags = [
        endpoint.http.head(f"/{MODEL}/resolve/{number}/{name}").headers["etag"]
        for name in ("config.json", WEIGHTS)
        for number in (1, 2)
    ]
    assert etags[0] == etags[1]
    assert etags[2] != etags[3]


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=100000-", 100_000, None),
        ("bytes=-7", -7, None),
        ("bytes=5-999999999999999999999999999999", 5, None),
        ("bytes=-" + "9" * 5000, 0, None),
        ("Bytes = 1 - 2", 1, 3),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_range_is_what_slicing_gives(small_pieces: Endpoint, asked: str, start: int, end: int | None) -> None:
    weights = (small_pieces.folder(2) / WEIGHTS).read_bytes()
    expected = weights[start:end]
    answer = small_pieces.http.get(f"/{MODEL}/resolve/2/{WEIGHTS}", headers={"range": asked})
    assert answer.status_code == 206
    assert answer.content == expected
    first = start % len(weights)
    last = first + len(expected) - 1
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(weights)}"
    assert answer.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize(
    "asked", ["bytes=5-4", "bytes=-", "bytes=", "x", "lines=1-2", "bytes=0-1,3-4", "bytes=1-2-3", "bytes=é-"]
)
def test_a_range_that_makes_no_sense_gives_the_whole_file(endpoint: Endpoint, asked: str) -> None:
    answer = endpoint.http.get(f"/{MODEL}/resolve/2/config.json", headers={"range": asked.encode("latin-1")})
    assert answer.status_code == 200
    assert answer.content == (endpoint.folder(2) / "config.json").read_bytes()


@pytest.mark.parametrize("asked", ["bytes=10000000-", "bytes=-0", "bytes=" + "9" * 5000 + "-"], ids=len)
def test_a_range_behind_the_end_is_refused(endpoint: Endpoint, asked: str) -> None:
    answer = endpoint.http.get(f"/{MODEL}/resolve/2/config.json", headers={"range": asked})
    assert answer.status_code == 416
    size = (endpoint.folder(2) / "config.json").stat().st_size
    assert answer.headers["content-range"] == f"bytes */{size}"
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_range_of_another_content_gives_the_whole_file(endpoint: Endpoint) -> None:
    url = f"/{MODEL}/resolve/2/{WEIGHTS}"
    etag = endpoint.http.head(url).headers["etag"]
    other = endpoint.http.head(f"/{MODEL}/resolve/1/{WEIGHTS}").headers["etag"]
    for condition, status in ((etag, 206), (other, 200)):
        answer = endpoint.http.get(url, headers={"range": "bytes=5-", "if-range": condition})
        assert answer.status_code == status


def test_files_are_read_in_pieces(small_pieces: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_pieces.running.service.catalog.store
    read_range, lengths = store.read_range, []

    def counted(key: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return read_range(key, start, length)

    monkeypatch.setattr(store, "read_range", counted)
    weights = (small_pieces.folder(1) / WEIGHTS).read_bytes()
    assert small_pieces.http.get(f"/{MODEL}/resolve/1/{WEIGHTS}").content == weights
    assert max(lengths) == 50_000
    assert sum(lengths) == len(weights)
    lengths.clear()
    part = small_pieces.http.get(f"/{MODEL}/resolve/1/{WEIGHTS}", headers={"range": "bytes=7-9"})
    assert part.content == weights[7:10]
    assert lengths == [3]


def test_downloads_that_ended_or_broke_leave_the_next_one_its_room(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (endpoint.folder(1) / WEIGHTS).read_bytes()
    url = f"/{MODEL}/resolve/1/{WEIGHTS}"
    with endpoint_of(endpoint.running, HubSizes(read=len(weights), room=16 * len(weights))) as found:
        store = found.running.service.catalog.store
        read_range, lengths = store.read_range, []

        def counted(key: str, start: int, length: int) -> bytes:
            lengths.append(length)
            return read_range(key, start, length)

        assert found.http.get(url).content == weights
        for _ in range(20):
            with found.http.stream("GET", url) as answer:
                assert next(answer.iter_raw(1000))
        monkeypatch.setattr(store, "read_range", counted)
        eventually(lambda: _read_at_once(found, url, lengths) == [len(weights)])
        with endpoint_of(endpoint.running, HubSizes(read=len(weights), room=0)) as crowded:
            lengths.clear()
            assert crowded.http.get(url).content == weights
            assert max(lengths) == SMALLEST_BYTES < len(weights)


def _read_at_once(found: Endpoint, url: str, lengths: list[int]) -> list[int]:
    """Lengths that a whole download has read."""
    lengths.clear()
    found.http.get(url).raise_for_status()
    return list(lengths)


@pytest.mark.parametrize("revision", ["refs%2Fpr%2F1", "refs%2fheads%2fmain", "main%2F..", "prod%2Fconfig.json"])
def test_a_quoted_slash_belongs_to_the_revision(endpoint: Endpoint, revision: str) -> None:
    for path in (
        f"/{MODEL}/resolve/{revision}/config.json",
        f"/api/models/{MODEL}/revision/{revision}",
        f"/api/models/{MODEL}/tree/{revision}",
    ):
        answer = endpoint.http.get(path)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound"), path
    assert endpoint.http.get(f"/{MODEL}/resolve/%70rod/%63onfig.json").status_code == 200


HOSTILE = ["..", "%2e%2e", "..%2f..%2fhead.json", "%00", "%ff%fe", "%ed%a0%80", "a%0d%0aX:1", "%5c", "a" * 5000, "é", "%25", "-"]  # fmt: skip


@pytest.mark.parametrize("segment", HOSTILE, ids=lambda segment: segment[:20])
def test_hostile_names_are_not_found(endpoint: Endpoint, segment: str) -> None:
    for path in (
        f"/{segment}/hub/resolve/main/config.json",
        f"/tests/{segment}/resolve/main/config.json",
        f"/{MODEL}/resolve/{segment}/config.json",
        f"/{MODEL}/resolve/main/{segment}",
        f"/{MODEL}/resolve/main/../{segment}",
        f"/{MODEL}/resolve/main//{segment}",
        f"/{MODEL}/resolve//{segment}",
        f"/api/models/{segment}/hub",
        f"/api/models/tests/{segment}/refs",
        f"/api/models/{MODEL}/revision/{segment}",
        f"/api/models/{MODEL}/tree/main/{segment}",
    ):
        for method in ("GET", "HEAD"):
            answer = endpoint.raw(method, path)
            assert answer.status_code in (404, 405, 400), (path, answer.text)
            if answer.headers.get("x-error-code") == "EntryNotFound":
                assert answer.headers["x-repo-commit"] == endpoint.sha("main")
    found = endpoint.http.post(f"/api/models/{MODEL}/paths-info/main", content=f"paths={segment}".encode())
    assert (found.status_code, found.json()) == (200, [])


def test_hostile_forms_and_parameters_are_client_errors(endpoint: Endpoint) -> None:
    url = f"/api/models/{MODEL}/paths-info/main"
    for body in (b"\xff\xfe", b"paths=x&" * 20_000):
        assert endpoint.http.post(url, content=body).status_code == 400
    assert endpoint.http.post(url, content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    wrong = (
        b"[",
        b"{}",
        b"[]",
        b'{"paths": "config.json"}',
        b'{"paths": [1]}',
        b'{"paths":' + b"[" * 100_000,
    )
    for body in (*wrong, b'{"paths": [' + b'"",' * 10_001 + b'""]}'):
        assert endpoint.http.post(url, content=body).status_code == 400
        assert endpoint.http.post(url, content=body, headers={"content-type": "application/json"}).status_code == 400
    for body in (b"", b"nothing", b'{"paths": []}'):
        answer = endpoint.http.post(url, content=body)
        assert (answer.status_code, answer.json()) == (200, [])
    tree = f"/api/models/{MODEL}/tree/main"
    for query in ("limit=0", "limit=x", "limit=" + "9" * 5000, "expand=perhaps"):
        assert endpoint.http.get(f"{tree}?{query}").status_code == 400
    assert endpoint.http.get(f"{tree}?cursor=%ff").status_code == 200
    assert endpoint.http.get(f"{tree}?cursor=~").json() == []


def test_a_file_that_is_gone_from_the_store_is_a_problem_and_no_stream(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = endpoint.folder(1) / "README.hidden"
    (endpoint.folder(1) / "README.md").rename(hidden)
    try:
        answer = endpoint.http.get(f"/{MODEL}/resolve/1/README.md")
        assert answer.status_code == 500
        assert answer.json()["type"] == "urn:weighbridge:error:data_loss"
    finally:
        hidden.rename(endpoint.folder(1) / "README.md")


def test_parts_of_a_file_that_are_read_at_once_are_compared_together(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = endpoint.running.service
    hub = Hub(service.catalog, service.store_readers)
    version = hub.version(MODEL, "prod")
    described, comparisons, others = HubVersion.file, list[ReadChecks](), list[Thread]()

    def ask() -> None:
        comparisons.append(hub._checks_of(version, WEIGHTS))

    def file(of: HubVersion, path: str) -> FileEntry:
        if not others:  # another reader comes while the first one finds out what is to be compared
            others.append(Thread(target=ask))
            others[0].start()
            others[0].join(0.05)
        return described(of, path)

    monkeypatch.setattr(HubVersion, "file", file)
    ask()
    others[0].join()
    one, other = comparisons
    assert one is other
