"""Settings and fixtures of all tests."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from hypothesis import settings

from tests.support.disk import disk_without_wait
from tests.support.fast import is_fast, is_fast_file
from tests.support.rounds import rounds
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, seaweedfs
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.objects import ObjectStore

pytest_plugins = (
    "tests.support.costs",
    "tests.support.costly",
    "tests.support.cells",
    "tests.support.changed",
    "tests.support.core",
    "tests.support.file_items",
)

# Machines that run tests are shared: how long one example takes says nothing. The same examples are tried in each run
# of `make test`.
settings.register_profile(
    "weighbridge",
    deadline=None,
    max_examples=rounds("EXAMPLES"),
    derandomize="WEIGHBRIDGE_SEED" not in os.environ,
)
settings.load_profile("weighbridge")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-fast`."""
    parser.addoption("--fast", action="store_true", help="only tests that start neither services nor processes")


def pytest_configure() -> None:
    """Let interrupts interrupt what tests start, also where these tests run in the background: shells let such jobs
    ignore them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are not fast, before they import what they need."""
    is_test = collection_path.name.startswith("test_")
    return True if config.getoption("fast") and is_test and not is_fast_file(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are not fast, if asked to."""
    if config.getoption("fast"):
        slow = [item for item in items if isinstance(item, pytest.Function) and not is_fast(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session", autouse=True)
def cheap_flushes() -> Iterator[None]:
    """See `disk_without_wait`."""
    with disk_without_wait():
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
    """Location of an empty store, of each kind in turn."""
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
