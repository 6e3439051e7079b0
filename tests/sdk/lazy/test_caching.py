"""Does a folder that cannot be written say which one it is, and what to set?"""

from __future__ import annotations

from pathlib import Path

import pytest

from weighbridge._lazy.caching import CACHE_VARIABLE, cache_folder, folder_of
from weighbridge.errors import FailedPrecondition

FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}


def test_files_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    folder = folder_of("vllm", FILES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert folder_of("vllm", dict(reversed(FILES.items()))) == folder
    other = folder_of("vllm", {**FILES, "config.json": b"{ }"})
    assert sorted(folder.parent.iterdir()) == sorted([folder, other])


def test_a_cache_that_cannot_be_written_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/proc/nowhere")
    with pytest.raises(FailedPrecondition, match="cannot be stored in /proc/nowhere/vllm: ") as told:
        folder_of("vllm", FILES)
    assert CACHE_VARIABLE in told.value.fix


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where neither HOME nor passwd has one
    with pytest.raises(FailedPrecondition, match="has no home") as told:
        cache_folder()
    assert CACHE_VARIABLE in told.value.fix
