"""What holds for all tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import botocore.session
import pytest
from _pytest.nodeid import NodeId
from hypothesis import settings

from tests.support.fast import is_fast, is_fast_file
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, seaweedfs
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.objects import ObjectStore

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

# machines that run tests are shared: how long one example takes says nothing
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-fast`."""
    parser.addoption(
        "--fast", action="store_true", help="only tests that start neither services nor processes"
    )


def pytest_configure() -> None:
    """Let interrupts interrupt what tests start, also where these tests run in the background: shells let such jobs ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are not fast, before they import what they need."""
    is_test = collection_path.name.startswith("test_")
    return True if config.getoption("fast") and is_test and not is_fast_file(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import files of tests without collecting garbage in between, and without torch's compiler.

    megatron-core has small functions compiled where they are defined. What tests define is compiled where they ask for it.
    """
    gc.disable()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        return (yield)
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are not fast, if asked to, and keep groups of tests in one worker.

    pytest-xdist 3.8 tells of groups in a field that pytest 9 does not read any more.
    """
    if config.getoption("fast"):
        slow = [item for item in items if not is_fast(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if is_fast(item)]
    if getattr(config.option, "loadgroup", False):
        for item in items:
            groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
            if groups and "@" not in item.nodeid:
                item._id = NodeId.parse(f"{item.nodeid}@{groups[0]}")


def pytest_collection_finish() -> None:
    """Leave what has been imported out of garbage collection: full collections go through what tests make, and not all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def disk_without_wait() -> Iterator[None]:
    """Flushes of files and folders return at once: they last for milliseconds each, and show only after a loss of power.

    That files are flushed, and which, is for tests to see that watch the calls; processes that are started as programs flush.
    """
    really = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def flush(name: str, file: FileDescriptorLike) -> None:
        mode = os.fstat(file if isinstance(file, int) else file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            really[name](file)

    with pytest.MonkeyPatch.context() as patch:
        for name in really:
            patch.setattr(os, name, functools.partial(flush, name))
        yield


@pytest.fixture(scope="session")
def aws_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The test servers' credentials, for this process and those that it starts, and nothing of the user's own."""
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_CONFIG_FILE", nowhere)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in (
            "AWS_PROFILE",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
        ):
            patch.delenv(name, raising=False)
        # to read boto3's description of S3 takes longer than most tests
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session")
def seaweed(aws_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS. Every worker that needs one has its own: none outlives or waits for another."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store is that has nothing in it: of each kind, one after the other."""
    if request.param == "local":
        return str(tmp_path / "store")
    server: S3Server = request.getfixturevalue("seaweed")
    return server.location()


@pytest.fixture
def store(location: str) -> Iterator[ObjectStore]:
    """The store there."""
    opened = open_store(location)
    yield opened
    opened.close()
