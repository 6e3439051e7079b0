"""Tensors of models, as the service describes them. They are requested once, and again after the service has refused a
call that relied on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from weighbridge._clients.calls import push_calls
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.connection import Connection
from weighbridge._core.layouts import Layout, TensorSpec, WeightLinks
from weighbridge._core.references import parse_reference
from weighbridge._formats.memory_forms import TensorForms
from weighbridge.errors import InvalidArgument, NotFound

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class KnownTensors:
    """Cache of the tensors of models, for one client.

    Args:
        connection: connection of the client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tensors: dict[str, TensorForms] = {}
        self._registered: dict[tuple[str, frozenset[TensorSpec]], Mapping[str, TensorSpec]] = {}
        self._links: dict[tuple[str, frozenset[TensorSpec]], WeightLinks] = {}

    def of(self, model: str) -> AbstractContextManager[TensorForms]:
        """Context with a model's tensors by Hugging Face's names."""
        return self._kept(self._tensors, model, _tensor_forms(model))

    def described(self, model: str, *, refresh: bool) -> TensorForms:
        """Return the tensors as `of` does, for callers that make no call that relies on them.

        ``refresh`` requests them again.
        """
        known = self._tensors.pop(model, None) if refresh else None
        with self.of(model) as tensors:
            if known == tensors:
                self._tensors[model] = tensors = known  # keeps values that were derived from them
            return tensors

    def registered(self, model: str, layout: Layout) -> AbstractContextManager[Mapping[str, TensorSpec]]:
        """Context with the tensors of a layout as they are registered for the model, by Megatron-core's names."""
        specs = layout.tensors.values()
        asking = push_calls.registered_specs(model, specs)
        return self._kept(self._registered, (model, frozenset(specs)), asking)

    def links(self, base: str, beside: Collection[TensorSpec]) -> WeightLinks:
        """Return the positions of the elements of Megatron-core's tensors in those of a base. If the base is named by a
        ref, the service is asked each time.
        """
        if not beside:
            return WeightLinks({}, {}, ())
        meant = parse_reference(base)
        key = base, frozenset(beside)
        links = self._links.get(key)
        if links is None:
            links = self._connection.run(push_calls.weight_links(meant.model, beside))
            if meant.version.isdecimal():
                self._links[key] = links
        return links

    @contextmanager
    def _kept(self, known: dict[KeyT, ValueT], key: KeyT, asking: Steps[ValueT]) -> Iterator[ValueT]:
        value = known.get(key)
        if value is None:
            value = known[key] = self._connection.run(asking)
        try:
            yield value
        except (
            InvalidArgument,
            NotFound,
        ):  # the model may have been deleted, and registered again with other tensors
            known.pop(key, None)
            raise


def _tensor_forms(model: str) -> Steps[TensorForms]:
    return TensorForms((yield from push_calls.describe_tensors(model)).tensors)
