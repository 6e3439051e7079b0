"""Connector of SGLang: a server's start from ``weighbridge://HOST:PORT/NAMESPACE/NAME@VERSION``.

This works as with SGLang's own remote stores: each process that reads the configuration and tokenizer downloads them to
a temporary folder, and the loader for remote models loads the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from sglang.srt.connector import BaseFileConnector

from weighbridge._core.file_names import is_adapter
from weighbridge._formats.hf_folder import write_side_files
from weighbridge.follow.wanted import SCHEME, Wanted
from weighbridge.integrations.engine_rank.agreement import ProcessGroup
from weighbridge.integrations.sglang.model import number_on, sglang_rank, source_of


class Connector(BaseFileConnector):  # type: ignore[misc]  # SGLang's, of which mypy sees nothing
    """A version as one of SGLang's remote stores."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.wanted = Wanted.from_url(url)
        self.weights: Iterator[tuple[str, torch.Tensor]] = iter(())

    def pull_files(self, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None) -> None:
        """Download the version's files other than weights to `get_local_dir`."""
        allowed, ignored = ["*"] if allow_pattern is None else allow_pattern, ignore_pattern or []
        wanted = {
            name: content
            for name, content in self._files().items()
            if _matches(name, allowed) and not _matches(name, ignored)
        }
        write_side_files(Path(self.get_local_dir()), wanted)

    def glob(self, allow_pattern: list[str] | None = None) -> list[str]:
        """Names of the version's files other than weights."""
        return [name for name in self._files() if _matches(name, allow_pattern or ["*"])]

    def weight_iterator(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors for which SGLang's own loader must run."""
        return self.weights

    def _files(self) -> dict[str, bytes]:
        with source_of(self.wanted).connect() as client:
            files = client.model_files(self.wanted.model, self.wanted.version)
            if is_adapter(files):
                client.model(self.wanted.model).check_whole()
            return files


def connect(original: Callable[..., Any], url: str, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``create_remote_connector``: adds a kind of URL."""
    return Connector(url) if url.startswith(f"{SCHEME}://") else original(url, *args, **kwargs)


def load_first(
    original: Callable[..., Any], loader: Any, model: torch.nn.Module, client: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``RemoteModelLoader._load_model_from_remote_fs``: each rank fetches its own slices, and the loader loads
    the rest.
    """
    if isinstance(client, Connector):
        from sglang.srt.distributed.parallel_state import get_world_group

        rank, wanted = sglang_rank(model), client.wanted
        number = number_on(ProcessGroup(get_world_group().cpu_group), rank, wanted)
        source, recording = rank.load(source_of(wanted), number)
        client.weights = source.tensors(None if recording is None else recording.unrecorded)
    return original(loader, model, client, *args, **kwargs)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
