"""A store to damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.service.fsck.damaged_stores import LONG, NAME
from tests.support.heads import edit_document
from tests.support.small_stores import add_model, unpack
from weighbridge_storage.stores.local import LocalStore


@pytest.fixture(scope="package")
def with_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store: `MODEL`, another one, and `LONG` with 150 versions, most of them in the tree of its history."""
    folder = unpack(tmp_path_factory.mktemp("with-long"))
    add_model(folder, str(LONG), range(1, 151))
    return folder


@pytest.fixture(scope="package")
def template(with_long: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without `LONG`, on which checks spend most of their time."""
    folder = shutil.copytree(with_long, tmp_path_factory.mktemp("template") / "store")
    shutil.rmtree(folder / LONG.prefix)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A copy of the template, in which no version is being received."""
    copy = shutil.copytree(template, tmp_path / "store")
    edit_document(copy / NAME.head_key, open=[])
    return copy


@pytest.fixture
def long(with_long: Path, folder: Path) -> None:
    """`LONG`, in that copy."""
    shutil.copytree(with_long / LONG.prefix, folder / LONG.prefix)


@pytest.fixture
def opened(folder: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(folder)) as store:
        yield store
