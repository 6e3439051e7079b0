"""Model of one engine rank, as described by the engine's adapter: everything that an engine adds to the contract."""

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
"""Number of copies of a version, in total and per parameter, from which staging is faster: for experts that engines
stack.
"""

Rest = Sequence[tuple[str, torch.Tensor]]
"""Names and tensors, in host memory, for which the model's own loader must run at each update."""


class EngineAsleep(FailedPrecondition):
    """Parameters have no memory while the engine sleeps."""


class EngineModel(ABC):
    """A model that computes with the same parameters that its own ``load_weights`` fills in place.

    A subclass states which ranks the model is sharded over, and what its loader's choices depend on. It overrides the
    other methods if the engine repacks its weights or loads them in its own way.

    Args:
        model: a `torch.nn.Module`, with a ``load_weights`` unless `load` is overridden.

    Attributes:
        kind: kind of the engine in lists of the service's engines; an engine without a kind is not reported.
        place: reserved memory on the parameters' device where a version is staged before it is applied; None if there
            is none.
        staging: lock that is held by the thread that stages a version.
        drafter: the model that drafts for this one in speculative decoding and is filled by updates; None if there is
            none.
        apart: name, for errors, of a drafter that versions of this model do not fill; empty if there is none. Updates
            may include versions of its own.
        aside: that drafter, until its first own version arrives; None if it is not in this process or not known.
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
        """From now on also fill the drafter: everything that it does not share with the model, through its own loader.

        Args:
            drafter: a `torch.nn.Module`.
            name: its name in errors.
        """
        self.drafter, self._name_of_drafter = drafter, name
        self._model = WithDrafter(self._model, drafter)

    def part(self) -> None:
        """Stop filling the drafter: it keeps its current weights."""
        self._model = self._model.target
        self.drafter, self.apart = None, self._name_of_drafter

    def join_aside(self, draft: str) -> None:
        """From now on also fill the drafter that is a separate model. No additional memory is reserved for it.

        Args:
            draft: the version to fill it from.

        Raises:
            FailedPrecondition: there is no such drafter.
        """
        if self.drafter is None and self.aside is not None:
            place, self.place = self.place, None
            self.join(self.aside, self.apart)
            self.place = place
        if self.drafter is None or not self.apart:
            has = "its drafter is a part of the policy's versions" if self.drafter else "it has no known drafter"
            raise FailedPrecondition(
                (
                    "the engine does not accept a version of a drafter in addition to the "
                    f"policy's, such as {draft}: {has}"
                ),
                fix=WITHOUT if self.apart else "name no drafter for this engine",
            )

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The ranks that update together. All of them make the same calls in the same order."""

    @abstractmethod
    def configuration(self) -> str:
        """A string that is equal whenever the loader makes the same choices: the engine's release and parallelism, this
        rank, the model's configuration. It need not contain the names, shapes and dtypes of tensors and parameters. It
        is compared before each version; if it has changed, the loader is recorded again.
        """

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the model, which is compared with each version's; None skips the
        comparison.
        """
        return getattr(self.model if self.drafter is None else self.model.target, "config", None)

    @property
    def pin(self) -> bool:
        """Whether to fetch bytes to pinned memory: true if the parameters are on a GPU."""
        return any(tensor.is_cuda for tensor in itertools.islice(self.model.parameters(), 1))

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own loader."""
        return self.model.load_weights(tensors)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers, by name, that the loader may write to.

        Tensors that share memory appear once, under their first name.
        """
        return targets_of(self.model)

    def storageless(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Stand-ins for `targets` while the loader is recorded; afterwards the model is restored."""
        return storageless(self.model)

    def spare(self, parameter: torch.Tensor) -> int:
        """Number of elements of a parameter that a version may leave unchanged, such as padding."""
        return 0

    def record(self, source: lazy.Source) -> lazy.Recording:
        """Record which slices this rank needs of any version with the same tensors as this one. Called in the engine's
        own thread while the model does not compute.

        Raises:
            FailedPrecondition: the loader does not accept the version, or would leave a parameter without a value.
            LayoutError: a part of a tensor does not fit where the loader puts it.
        """
        with self.storageless() as targets:
            return self.record_on(targets, source, self.configuration())

    def record_first(self, source: lazy.Source) -> lazy.Recording | None:
        """`record` for a model that has no weights yet; None if this loader cannot be recorded, only run."""
        return self.record(source)

    def record_on(
        self, targets: Mapping[str, torch.Tensor], source: lazy.Source, configuration: str | None
    ) -> lazy.Recording:
        """Run the loader over these targets, or reuse the earlier recording for this configuration, and check that no
        parameter is left out.

        Raises:
            FailedPrecondition: the loader does not accept the version (the error names the last tensor that it
                received), or a parameter gets no value.
            LayoutError: a part of a tensor was copied to a place where it does not fit; names the tensor.
        """
        named = dict(self.model.named_parameters())
        own = {name: each for name, each in named.items() if self.drafter is not None and name.startswith(PREFIX)}
        # the model before its drafter: a tensor that does not fit the model itself must not cause the drafter to be
        # left behind
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
        """A recording of the model, extended by the slices that the drafter's loader needs of its version."""
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
                (
                    f"the engine's loader cannot load {source.version}: it failed{where} with "
                    f"{type(error).__name__}: {error}"
                ),
                fix="start the engine with the configuration of this model",
            ) from error

    def check(self, recording: lazy.Recording) -> None:
        """Refuse to fill a model if its parameters are not the recorded ones.

        Raises:
            FailedPrecondition: a parameter no longer exists; names it.
            LayoutError: the shape, strides or dtype of a parameter changed; names it.
        """
        recording.check(self.targets())

    def live(self, recording: lazy.Recording) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
        """Parameters that the model uses as they were loaded, by the names of the recording's targets; and for each
        other parameter the reason why its bytes differ from those of a version. Called while the model may compute.
        """
        targets = self.targets()
        seen = {
            name: targets[name]
            for name, shape in recording.targets.items()
            if name in targets and lazy.Shape.of(targets[name]) == shape
        }
        return seen, unseen(self.model, recording, seen)

    def computed_with(self) -> Mapping[str, torch.Tensor]:
        """All tensors with elements that the model has now, by name, whether loaded or derived from loaded tensors;
        shared tensors under each of their names.
        """
        kinds = (self.model.named_parameters, self.model.named_buffers)
        found = {name: tensor for kind in kinds for name, tensor in kind(remove_duplicate=False)}
        return {name: tensor for name, tensor in found.items() if tensor.numel()}

    def hidden(self) -> Mapping[str, str]:
        """Weights that are in none of these tensors, by name, with the reason."""
        return {}

    def load_again(self, source: lazy.Source) -> None:
        """Load a version over the current weights with the model's own loader, while the model does not compute.

        The recording is not used.
        """
        if self.drafter is not None:
            with unshared(self.model.target, self.drafter):
                self.drafter.load_weights(of_drafter(source).tensors())
        self.load(source.tensors())

    def check_awake(self) -> None:
        """Refuse to fill parameters whose memory the engine has released, as vLLM and SGLang do while they sleep.

        Raises:
            EngineAsleep: names a parameter.
        """
        each = self.model.named_parameters()
        held = ((name, p) for name, p in each if p.is_cuda and p.numel() and p.data_ptr())
        for name, target in itertools.islice(held, 1):  # all of them sleep together
            if not cuda_copies.is_mapped(target.data_ptr()):
                raise EngineAsleep(
                    f"the engine sleeps: {name} has no memory",
                    fix=(
                        "wake its weights up, and update it again; vLLM applies the version on "
                        "wake-up if when_asleep is wait"
                    ),
                )

    def staging_place(self, recording: lazy.Recording) -> lazy.StagingPlace | None:
        """Place where a version is staged before it is applied: reserved GPU memory if there is any; else pinned host
        memory, if the version has so many tensors that launching their copies takes longer than transferring their
        bytes; None to leave the bytes where they arrive.
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
                log.warning("%d bytes cannot be pinned, so updates take longer: %s", nbytes, error)
                return None
            self._host_place = lazy.StagingPlace(memory)
        return self._host_place

    def process_staged(self, update: lazy.Update, recording: lazy.Recording) -> int:
        """Process staged parameters into the form that the engine computes with, as far as that requires no live
        tensor. Called in another thread while the model computes, once the staged bytes are verified to be those of the
        version.

        Args:
            update: the staged update.
            recording: the recording that it was made from.

        Returns:
            Number of layers that were processed.
        """
        return 0

    def bring_rest(self, client: EngineClient, source: lazy.Source, recording: lazy.Recording) -> Rest:
        """Fetch the tensors of a version that the recording does not cover, usually none.

        Called in another thread while the model computes.
        """
        if not recording.unrecorded:
            return []
        return list(client.pull(source.version.model, source.version.number, FullTensors(tuple(recording.unrecorded))))

    def fill(self, update: lazy.Update, recording: lazy.Recording, rest: Rest) -> None:
        """Write a fetched version into the parameters, while the model does not compute.

        The loader always runs: some loaders derive values from the weights at their end.

        Args:
            update: the prepared update.
            recording: the recording that it was made from.
            rest: result of `bring_rest`.
        """
        update.fill_all(self.targets())
        self.load(iter(rest))


def _of_drafter(configuration: str | None) -> str | None:
    return None if configuration is None else f"drafter: {configuration}"


@functools.cache
def _loader_digest(kind: type) -> str:
    """Digest of the source files that define the loader of a model's class: another package may change while the
    engine's release does not.
    """
    digest = hashlib.sha256()
    loaders = [vars(each)["load_weights"] for each in kind.__mro__ if "load_weights" in vars(each)]
    for code in (getattr(inspect.unwrap(loader), "__code__", None) for loader in loaders):
        with suppress(OSError):
            digest.update(b"" if code is None else Path(code.co_filename).read_bytes())
    return digest.hexdigest()
