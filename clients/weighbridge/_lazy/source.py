"""Source of lazy tensors: those of one version, fetched while an engine's loader runs over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weighbridge._clients.engine import EngineClient
from weighbridge._core.slices import Boxes
from weighbridge._lazy.tensor import LazyTensor
from weighbridge.errors import NotFound

log = logging.getLogger(__name__)


class Source:
    """A version, for a loader that fetches what it copies at the moment when it does.

    Args:
        client: stays open as long as tensors are copied from.
        model: ``namespace/name``.
        version: a number or a ref; where a ref moves meanwhile does not matter.

    Attributes:
        version: which version it is.
        specs: its tensors.
        fetched_bytes: how many bytes have been fetched.

    Raises:
        NotFound: no such model, version or ref.
        FailedPrecondition: the version is not ready.
    """

    def __init__(self, client: EngineClient, model: str, version: str | int = "latest") -> None:
        plan = client.pull(model, version)
        self.version = plan.version
        self.specs = tuple(plan.layout.tensors.values())
        self.fetched_bytes = 0
        self._client = client
        self._told: set[object] = set()

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and lazy tensor of each tensor, or of those named; what is copied from one is fetched.

        Raises:
            NotFound: the version has no such tensor.
        """
        found = {spec.name: spec for spec in self.specs}
        for name in found if names is None else names:
            if name not in found:
                raise NotFound(f"{self.version} has no tensor {name!r}")
            yield name, LazyTensor.of(found[name], self)

    def copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Fetch what is copied. A target without storage gets nothing."""
        if not target.is_meta and target.numel():
            target.copy_(self._fetched(source))

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Fetch what an operation needs, and carry it out."""
        real_args, real_kwargs = tree_map_only(
            LazyTensor, lambda lazy: self._told_of(func, lazy), (args, kwargs)
        )
        return func(*real_args, **real_kwargs)

    def _told_of(self, func: Callable[..., Any], lazy: LazyTensor) -> torch.Tensor:
        if func not in self._told:
            self._told.add(func)
            log.warning(
                "the loader uses %s on %s: such tensors are fetched at once, %s of this one",
                func,
                lazy.spec.name,
                lazy.located()[0],
            )
        return self._fetched(lazy).to(lazy.device)

    def _fetched(self, lazy: LazyTensor) -> torch.Tensor:
        box, _ = lazy.located()
        if not box.volume:
            return torch.empty(lazy.shape, dtype=lazy.dtype, device="cpu")
        asked = Boxes([(lazy.spec.name, box.offset, box.extent)])
        pull = self._client.pull(self.version.model, self.version.number, asked)
        [(_, dense)] = pull
        self.fetched_bytes += pull.nbytes
        return lazy.filled(dense)
