"""Model of one engine rank, as its adapter describes it: all that an engine has to add to the contract."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.slices import FullTensors
from weighbridge._memory import cuda_copies
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.integrations.engine_rank.agreement import Ranks
from weighbridge.integrations.engine_rank.drafting import (
    PREFIX,
    WITHOUT,
    WithDrafter,
    filling_drafter,
    joined,
    of_drafter,
    unshared,
)
from weighbridge.integrations.engine_rank.fitting import check_covered, unseen
from weighbridge.integrations.engine_rank.storageless import storageless, targets_of

log = logging.getLogger(__name__)

_MANY_STEPS, _MANY_STEPS_A_TARGET = 2048, 4
"""Copies of a version, in all and for each parameter, from which on staging pays: experts that engines stack."""

Rest = Sequence[tuple[str, torch.Tensor]]
"""Names and tensors of a version for which the model's own loader has to run each time, in host memory."""


class EngineAsleep(FailedPrecondition):
    """Parameters have no memory while the engine sleeps."""


class EngineModel(ABC):
    """A model that computes with the parameters which its own ``load_weights`` fills, in place.

    A subclass says which ranks the model is spread over, and what its loader's choices depend on. The other methods are overridden where
    an engine repacks its weights, or loads them in a way of its own.

    Args:
        model: a `torch.nn.Module`, with a ``load_weights`` unless `load` is overridden.

    Attributes:
        kind: what the engine is, in lists of the service's engines; one without a kind is not reported.
        place: spare memory on the parameters' device to which a version is brought before it is applied; None without.
        staging: is held by the thread that brings a version to a staging place.
        drafter: the model that drafts for this one in speculative decoding, and is filled by updates; None without.
        apart: a drafter that versions of this model have nothing for, as errors call it; empty without. Versions of its own may come beside them.
        aside: that drafter, until the first version of its own comes; None if it is not in this process, or not known.
    """

    kind = ""

    def __init__(self, model: Any) -> None:
        self.place: lazy.StagingPlace | None = None
        self.staging = threading.Lock()
        self._host_place: lazy.StagingPlace | None = None
        self._cannot_pin = False
        self._model = model
        self.drafter: Any = None
        self._name_of_drafter = ""
        self.apart = ""
        self.aside: Any = None

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    def join(self, drafter: Any, name: str = "the drafter") -> None:
        """Fill the drafter, too, from now on: all that it does not share with the model, by its own loader.

        Args:
            drafter: a `torch.nn.Module`.
            name: of it, as errors call it.
        """
        self.drafter, self._name_of_drafter = drafter, name
        self._model = WithDrafter(self._model, drafter)

    def part(self) -> None:
        """Fill the drafter no more: it keeps the weights that it has."""
        self._model = self._model.target
        self.drafter, self.apart = None, self._name_of_drafter

    def join_aside(self, draft: str) -> None:
        """Fill the drafter that is a model of its own from now on. No more memory is reserved for it.

        Args:
            draft: the version that it is to be filled from.

        Raises:
            FailedPrecondition: there is no such drafter.
        """
        if self.drafter is None and self.aside is not None:
            place, self.place = self.place, None
            self.join(self.aside, self.apart)
            self.place = place
        if self.drafter is None or not self.apart:
            has = (
                "its drafter is a part of the policy's versions"
                if self.drafter
                else "it has no drafter that is known"
            )
            raise FailedPrecondition(
                f"the engine takes no version of a drafter beside the policy's, as {draft}: {has}",
                fix=WITHOUT if self.apart else "name no drafter for this engine",
            )

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The ranks that update together. All of them make the same calls in the same order."""

    @abstractmethod
    def configuration(self) -> str:
        """A text that is the same whenever the loader makes the same choices: the engine's release and parallelism, this rank, the
        model's configuration. Names, shapes and dtypes of tensors and parameters need not be in it. It is compared before each
        version, and when it has changed, the loader is recorded again.
        """

    @property
    def config(self) -> Any:
        """The Hugging Face configuration that the model was made with, to compare with each version's; None compares nothing."""
        return getattr(self.model if self.drafter is None else self.model.target, "config", None)

    @property
    def pin(self) -> bool:
        """Whether bytes are brought to pinned memory: whether the parameters are on a GPU."""
        return any(tensor.is_cuda for tensor in itertools.islice(self.model.parameters(), 1))

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own loader."""
        return self.model.load_weights(tensors)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """All that the loader may write to: parameters and buffers by name, of shared ones the first."""
        return targets_of(self.model)

    def storageless(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Stand-ins for `targets` while the loader is recorded; afterwards the model is as before."""
        return storageless(self.model)

    def spare(self, parameter: torch.Tensor) -> int:
        """Number of elements of a parameter that a version may leave as they are, such as padding."""
        return 0

    def record(self, source: lazy.Source) -> lazy.Recording:
        """Record what this rank takes of any version with the tensors of this one. Called in the engine's own thread, while nothing is computed.

        Raises:
            FailedPrecondition: the loader does not take the version, or would leave a parameter without a value.
            LayoutError: a part of a tensor does not fit where the loader puts it.
        """
        with self.storageless() as targets:
            return self.record_on(targets, source, self.configuration())

    def record_first(self, source: lazy.Source) -> lazy.Recording | None:
        """`record`, of a model that has no weights yet; None if this loader can only be run."""
        return self.record(source)

    def record_on(
        self, targets: Mapping[str, torch.Tensor], source: lazy.Source, configuration: str | None
    ) -> lazy.Recording:
        """Run the loader over these targets, or take what was recorded for the configuration before, and see that nothing is left out.

        Raises:
            FailedPrecondition: the loader does not take the version, names the last tensor that it received; or a parameter gets no value.
            LayoutError: a part of a tensor was copied to where it does not fit; names the tensor.
        """
        named = dict(self.model.named_parameters())
        own = {
            name: each for name, each in named.items() if self.drafter is not None and name.startswith(PREFIX)
        }
        # the model before its drafter: what does not fit the model itself is no reason to leave the drafter behind
        kind = type(self.model if self.drafter is None else self.model.target)
        found = self._recorded(self.load, kind, targets, source, configuration)
        if not found.unrecorded:
            others = {name: each for name, each in named.items() if name not in own}
            check_covered(found.unwritten, others, source.version, self.spare)
        if self.drafter is None or (self.apart and not isinstance(source, lazy.Pair)):
            return found
        with filling_drafter(source):
            found = self._with_drafter(found, targets, source, configuration)
            self._check_drafter_covered(found, own, of_drafter(source).version)
        return found

    def _check_drafter_covered(
        self, found: lazy.Recording, own: Mapping[str, torch.nn.Parameter], version: object
    ) -> None:
        written = {step.target for step in found.steps}
        if written.isdisjoint(own):  # though engines with quantized weights may spare any parameter
            check_covered(found.unwritten, own, version)
        check_covered(found.unwritten, own, version, self.spare)

    def _with_drafter(
        self,
        found: lazy.Recording,
        targets: Mapping[str, torch.Tensor],
        source: lazy.Source,
        configuration: str | None,
    ) -> lazy.Recording:
        """A recording of the model, with what the drafter's loader takes of its version."""
        mine = of_drafter(source)
        with unshared(self.model.target, self.drafter) as twins:
            recorded = self._recorded(
                self.drafter.load_weights,
                type(self.drafter),
                {**targets, **twins},
                mine,
                _of_drafter(configuration),
            )
        prefix = "" if mine is source else lazy.prefix_of(f"{mine.version.model}@")
        return joined(found, recorded, mine.version, prefix)

    def _recorded(
        self,
        load: lazy.Load,
        kind: type,
        targets: Mapping[str, torch.Tensor],
        source: lazy.Source,
        configuration: str | None,
    ) -> lazy.Recording:
        last: list[TensorSpec] = []

        def watched(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for spec, named in zip(source.specs, tensors, strict=True):
                last[:] = [spec]
                yield named

        def run(tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
            return load(watched(tensors))

        try:
            if configuration is None:
                return lazy.record(source.specs, run, targets)
            return lazy.remembered(source.specs, run, targets, f"{configuration}\n{_loader_digest(kind)}")
        except WeighbridgeError:
            raise
        except Exception as error:
            where = f" at {last[-1]}" if last else ""
            raise FailedPrecondition(
                f"the engine's loader does not take {source.version}: it ended{where} with {type(error).__name__}: {error}",
                fix="start the engine with the configuration of this model",
            ) from error

    def check(self, recording: lazy.Recording) -> None:
        """Refuse to fill a model whose parameters are not those that were recorded.

        Raises:
            FailedPrecondition: one is gone; names it.
            LayoutError: one has another shape, other strides or another dtype; names it.
        """
        recording.check(self.targets())

    def live(self, recording: lazy.Recording) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
        """Parameters that the model computes with as they were loaded, by the names of the recording's targets; and for all its other
        parameters the reason why their bytes are not those of a version. Called while the model may compute.
        """
        targets = self.targets()
        seen = {
            name: targets[name]
            for name, shape in recording.targets.items()
            if name in targets and lazy.Shape.of(targets[name]) == shape
        }
        return seen, unseen(self.model, recording, seen)

    def computed_with(self) -> Mapping[str, torch.Tensor]:
        """All tensors with elements that the model has now, by name, loaded or made of what was loaded; shared ones by each of their names."""
        kinds = (self.model.named_parameters, self.model.named_buffers)
        found = {name: tensor for kind in kinds for name, tensor in kind(remove_duplicate=False)}
        return {name: tensor for name, tensor in found.items() if tensor.numel()}

    def hidden(self) -> Mapping[str, str]:
        """Weights that are in none of these tensors, by name, and why."""
        return {}

    def load_again(self, source: lazy.Source) -> None:
        """Load a version by the model's own loader over what it has, while nothing is computed. What was recorded is not used."""
        if self.drafter is not None:
            with unshared(self.model.target, self.drafter):
                self.drafter.load_weights(of_drafter(source).tensors())
        self.load(source.tensors())

    def check_awake(self) -> None:
        """Refuse to fill parameters whose memory the engine has given back, as vLLM and SGLang do while they sleep.

        Raises:
            EngineAsleep: names a parameter.
        """
        each = self.model.named_parameters()
        held = ((name, p) for name, p in each if p.is_cuda and p.numel() and p.data_ptr())
        for name, target in itertools.islice(held, 1):  # all of them sleep together
            if not cuda_copies.is_mapped(target.data_ptr()):
                raise EngineAsleep(
                    f"the engine sleeps: {name} has no memory",
                    fix="wake its weights up, and update it again; vLLM brings it by the wake-up if when_asleep is wait",
                )

    def staging_place(self, recording: lazy.Recording) -> lazy.StagingPlace | None:
        """Place to which a version is brought before it is applied: memory of the card if some is reserved; else pinned host memory, if the
        version comes in so many tensors that to ask for their copies takes longer than their bytes do; None to leave the bytes where they come.
        """
        if self.place is not None or not self.pin:
            return self.place
        if (
            self._cannot_pin
            or len(recording.steps) < _MANY_STEPS
            or len(recording.steps) < _MANY_STEPS_A_TARGET * len(recording.targets)
        ):
            return None
        nbytes = lazy.staging_bytes(recording.targets.values())
        if self._host_place is None or self._host_place.nbytes < nbytes:
            self._host_place = None
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._cannot_pin = True
                log.warning("%d bytes cannot be pinned, so that updates take longer: %s", nbytes, error)
                return None
            self._host_place = lazy.StagingPlace(memory)
        return self._host_place

    def process_staged(self, update: lazy.Update, recording: lazy.Recording) -> int:
        """Make of staged parameters what the engine computes with, as far as that needs nothing that is live. Called in another thread, while the model
        computes, when the staged bytes are known to be those of the version.

        Args:
            update: staged.
            recording: that it was made of.

        Returns:
            Number of layers of which it was made.
        """
        return 0

    def bring_rest(self, client: EngineClient, source: lazy.Source, recording: lazy.Recording) -> Rest:
        """Bring the tensors of a version that the recording does not put in place, usually none. Called in another thread, while the
        model computes.
        """
        if not recording.unrecorded:
            return []
        return list(
            client.pull(source.version.model, source.version.number, FullTensors(tuple(recording.unrecorded)))
        )

    def fill(self, update: lazy.Update, recording: lazy.Recording, rest: Rest) -> None:
        """Put a version that has been brought into the parameters, while nothing is computed.

        The loader runs in any case: some loaders derive something from the weights at their end.

        Args:
            update: prepared.
            recording: that it was made of.
            rest: what `bring_rest` gave.
        """
        update.fill_all(self.targets())
        self.load(iter(rest))


def _of_drafter(configuration: str | None) -> str | None:
    return None if configuration is None else f"drafter: {configuration}"


@functools.cache
def _loader_digest(kind: type) -> str:
    """Digest of the source files that a model's class has its loader from: a package beside the engine may change while the engine's release stays."""
    digest = hashlib.sha256()
    loaders = [vars(each)["load_weights"] for each in kind.__mro__ if "load_weights" in vars(each)]
    for code in (getattr(inspect.unwrap(loader), "__code__", None) for loader in loaders):
        with suppress(OSError):
            digest.update(b"" if code is None else Path(code.co_filename).read_bytes())
    return digest.hexdigest()
