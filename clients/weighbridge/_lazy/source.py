"""Source of lazy tensors: a version's tensors, fetched while an engine's loader runs over them."""

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
    """A version, for a loader; elements are fetched when the loader copies them.

    Args:
        client: must stay open as long as tensors are copied from.
        model: ``namespace/name``.
        version: a number or a ref, resolved now.

    Attributes:
        version: the resolved version.
        specs: its tensors.
        fetched_bytes: number of bytes fetched so far.

    Raises:
        NotFound: the model, version or ref does not exist.
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
        """Name and lazy tensor of each tensor, or of those in ``names``; copying from one fetches its elements.

        Raises:
            NotFound: the version does not contain the tensor.
        """
        found = {spec.name: spec for spec in self.specs}
        for name in found if names is None else names:
            if name not in found:
                raise NotFound(f"{self.version} has no tensor {name!r}")
            yield name, LazyTensor.of(found[name], self)

    def copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Fetch the elements of a copy. A target without storage gets nothing."""
        if not target.is_meta and target.numel():
            target.copy_(self._fetched(source))

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Fetch the arguments of an operation, and carry it out."""
        real_args, real_kwargs = tree_map_only(LazyTensor, lambda lazy: self._told_of(func, lazy), (args, kwargs))
        return func(*real_args, **real_kwargs)

    def _told_of(self, func: Callable[..., Any], lazy: LazyTensor) -> torch.Tensor:
        if func not in self._told:
            self._told.add(func)
            log.warning(
                "the loader uses %s on %s: such tensors are fetched immediately; of this one, %s",
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
