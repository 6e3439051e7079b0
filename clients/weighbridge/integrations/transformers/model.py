"""Model of one rank of transformers, as `weighbridge.integrations.engine_rank` requires it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient
from weighbridge._formats.peft_models import has_adapters
from weighbridge._lazy.recording import Shape
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.agreement import OneRank, ProcessGroup, Ranks
from weighbridge.integrations.engine_rank.model import EngineModel, Rest
from weighbridge.integrations.transformers.building import Recipe, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersModel(EngineModel):
    """A model that ``from_pretrained`` created. Only a weak reference to it is kept.

    Args:
        model: the model.
        recipe: how transformers builds it.
        missing: names of parameters that receive nothing from a version.
        several: whether it is sharded over the ranks of torch.distributed.
        cast: whether its dtype may differ from the recipe's.
    """

    kind = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        missing: Collection[str] = (),
        *,
        several: bool,
        cast: bool = False,
    ) -> None:
        super().__init__(None)
        self._alive = weakref.ref(model)
        self._recipe = recipe
        self._missing = missing
        self._several = several
        self._cast = cast

    @property
    def model(self) -> Any:
        """The model.

        Raises:
            FailedPrecondition: it was garbage-collected.
        """
        model = self._alive()
        if model is None:
            raise FailedPrecondition("the model is gone")
        return model

    @property
    def ranks(self) -> Ranks:
        """The ranks of torch.distributed if the model is sharded over them."""
        return ranks_of(self._several)

    @property
    def config(self) -> Any:
        """None: transformers itself compares the version's tensors with those of the model."""
        return None

    def configuration(self) -> str:
        """Layout of the weights as a string. It changes if the model is cast, so that the loader is recorded again."""
        return str({name: tuple(Shape.of(tensor)) for name, tensor in self.targets().items()})

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Parameters and persistent buffers that a version fills.

        Raises:
            FailedPrecondition: peft has given the model adapters: versions contain weights without adapters, or with
                all of them merged.
        """
        if has_adapters(self.model):
            raise FailedPrecondition(
                (
                    "peft has added adapters to this model, and versions have none: a version of "
                    "merged weights would apply them twice"
                ),
                fix=(
                    "remove them before an update: model.unload(); or merge_and_unload(), and "
                    "attach() what that returns"
                ),
            )
        return {name: t for name, t in weights_of(self.model).items() if name not in self._missing}

    def record(self, source: lazy.Source) -> lazy.Recording:
        """Record which parts of the version's tensors transformers reads."""
        weights = self.targets()
        if self._cast:  # weights must not be rounded to a dtype that the model does not have
            dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
            self._recipe = replace(self._recipe, options={**self._recipe.options, "dtype": dtype})
        self._cast = True
        return self._recipe.record(source.specs, weights)

    def bring_rest(self, client: EngineClient, source: lazy.Source, recording: lazy.Recording) -> Rest:
        """Values, as transformers computes them, of parameters for which recording failed."""
        if not recording.unrecorded:
            return []
        weights, built = self.targets(), weights_of(self._recipe.build(dict(source.tensors()))[0])
        return [
            (name, torch.empty_like(tensor, device="cpu").copy_(built[name]))
            for name, tensor in weights.items()
            if name in recording.unwritten or name not in recording.targets
        ]

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the values from `bring_rest` into the existing parameter tensors."""
        weights = self.targets()
        with torch.no_grad():
            for name, tensor in tensors:
                weights[name].copy_(tensor)


def ranks_of(several: bool) -> Ranks:  # what is asked about
    """The ranks of torch.distributed if a model is sharded over them and the process group is initialised."""
    return ProcessGroup() if several and dist.is_initialized() else OneRank()
