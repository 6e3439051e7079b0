"""Trainer and vLLM engine that share a GPU in turns: one call transfers the trained weights to the engine, which slept
meanwhile.

The trainer's tensors are pushed to the service's host memory and then moved off the GPU before the engine's weights get
memory there. The weights are updated before the KV cache gets memory. So the GPU never contains two sets of weights, or
the trainer and a KV cache. This requires only vLLM's `LLM`.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.follow.engines import WAIT, Serving, StaleDrafter, serving_of
from weighbridge.follow.status import Status, label
from weighbridge.follow.updates import quietly
from weighbridge.follow.vllm import VllmServer, check_done
from weighbridge.integrations.engine_rank.agreement import OneRank, Ranks, RanksFailed, agree
from weighbridge.integrations.engine_rank.source import ModelSource

T = TypeVar("T")

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of sleeping memory."""
_LOOK_SECONDS = 0.004


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an update.

    Attributes:
        seconds: its duration.
        peak_bytes: peak GPU memory used meanwhile by all processes, sampled every few milliseconds; 0 without a GPU.
    """

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ColocatedUpdate:
    """An update of an engine by a trainer on the same card, part by part.

    Attributes:
        version: number of the version that the engine serves.
        push: until the version is complete in the service's memory, and the engine has begun to fetch it.
        offload: offload of the trainer's tensors.
        wake_weights: until the engine's weights have memory.
        update: until the weights are those of the version.
        wake_cache: until the engine may compute.
    """

    version: int
    push: Part
    offload: Part
    wake_weights: Part
    update: Part
    wake_cache: Part

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name, in their order."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "version"}

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """Peak GPU memory."""
        return max(part.peak_bytes for part in self.parts.values())


class SleepingEngine(Protocol):
    """An engine that can sleep and wake up, as `ColocatedEngine` requires it: a `VllmServer` or an `LlmEngine`."""

    def connect(self) -> None:
        """Set its source of versions, and make it restore its previous version if an update fails."""

    def serving(self) -> Serving:
        """Version that the engine serves."""

    def begin(self, version: int) -> object:
        """Begin to fetch a version to its machine."""

    def discard(self) -> None:
        """Release the fetched version."""

    def apply(self, version: int, label: str) -> None:
        """Write a version into its parameters."""

    def sleep(self, level: int) -> None:
        """Release GPU memory."""

    def wake_up(self, *tags: str) -> None:
        """Allocate GPU memory again."""


class LlmEngine:
    """A `vllm.LLM` of this process.

    Args:
        llm: started with ``enable_sleep_mode``, and ``load_format="weighbridge"`` or that backend of weight transfer.
        source: where versions come from.
        stale_drafter: policy for versions that leave its drafter behind; None keeps its start setting.
    """

    def __init__(self, llm: Any, source: ModelSource, stale_drafter: StaleDrafter | None = None) -> None:
        self._llm = llm
        self._source = source
        self._more = {"when_asleep": WAIT, **({"stale_drafter": stale_drafter} if stale_drafter else {})}

    def connect(self) -> None:
        """Send all workers the source of versions.

        Raises:
            FailedPrecondition: a worker cannot load them; states why.
        """
        self._ask("connect", json.dumps({**self._source.init_info, **self._more}))

    def serving(self) -> Serving:
        """Version that all workers serve."""
        answers = self._ask("status")
        ranks = {f"rank {each.get('rank', at)}": Status.from_json(each) for at, each in enumerate(answers)}
        return serving_of(ranks, self._source.model)

    def begin(self, version: int) -> None:
        """Request all workers to prepare a version; returns immediately."""
        self._ask("prepare", str(version))

    def discard(self) -> None:
        """Request all workers to release their prepared version."""
        self._ask("discard")

    def apply(self, version: int, label: str) -> None:
        """Write a version into the parameters, and report it in responses, which vLLM 0.24 does not support."""
        self._ask("apply", str(version))
        if hasattr(self._llm, "update_weight_version"):
            self._llm.update_weight_version(label)

    def sleep(self, level: int) -> None:
        """Release GPU memory."""
        self._llm.sleep(level=level)

    def wake_up(self, *tags: str) -> None:
        """Allocate GPU memory again."""
        self._llm.wake_up(tags=list(tags))

    def _ask(self, method: str, *arguments: str) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self._llm.collective_rpc(f"weighbridge_{method}", args=arguments)
        check_done(found)
        return found


class ColocatedEngine:
    """An engine that shares its GPU with the ranks of a trainer.

    All ranks make the same calls. If an engine has several ranks whose workers are in the trainer's processes, each
    rank passes its own `LLM`.

    Args:
        engine: a `vllm.LLM` of this process, or the URL of a server; None on ranks of the trainer without an engine.
        model: ``namespace/name``.
        server: the service's gRPC address, as the engine reaches it.
        lane: how weights travel to the engine; None keeps its start setting.
        stale_drafter: policy for versions that leave the engine's drafter behind: ``refuse`` or ``allow``; None keeps
            its start setting. With level 2, a drafter that is a separate model is lost.
        level: level of its sleep. With 2 its weights are discarded, which costs neither host memory nor time, because
            the service has them. With 1 vLLM keeps them; use this for engines with parameters that no version fills.
        ranks: ranks of the trainer, if there are several: a
            `weighbridge.integrations.engine_rank.agreement.ProcessGroup` of gloo.
        memory: returns the used bytes of the GPU; by default from CUDA.
    """

    def __init__(
        self,
        engine: Any,
        model: str,
        server: str,
        *,
        lane: str | None = None,
        stale_drafter: StaleDrafter | None = None,
        level: int = 2,
        ranks: Ranks | None = None,
        memory: Callable[[], int] | None = None,
    ) -> None:
        if level not in (1, 2):
            raise InvalidArgument(f"level is {level!r}", fix="use 1 or 2")
        self._engine = _engine(engine, model, server, lane, stale_drafter)
        self._model = model
        self._level = level
        self._ranks = ranks or OneRank()
        self._memory = memory

    def update(self, push: Callable[[], PushHandle], offload: Callable[[], object]) -> ColocatedUpdate:
        """Push the trained weights, move the trainer's tensors off the GPU, and wake the engine up with the version.

        Collective.

        If this fails before the engine has woken up, the engine continues to sleep with its previous version. If it
        fails later, the engine is put to sleep again, and the trainer can use the GPU. The engine's next wake-up
        restores its previous version, or fails if that is no longer available.

        Args:
            push: pushes this rank's tensors, for example
                ``partial(client.push_state_dict, "acme/policy", module, step=7)``.
            offload: moves the trainer's tensors off the GPU; this method then releases torch's cached memory. The
                tensors may be changed again.

        Raises:
            VersionFailed: the version could not be completed.
            FailedPrecondition: the engine could not load it; states the engine's version.
            RanksFailed: one of these errors occurred on another rank.
        """
        try:
            number, pushed = self._part(partial(self._push, push))
            _, offloaded = self._part(partial(_offload, offload))
            woken = self._wake_weights()
        except BaseException:
            self._quietly(SleepingEngine.discard)
            raise
        try:
            name = label(self._model, number)
            _, updated = self._part(partial(self._ask, SleepingEngine.apply, number, name))
            _, computing = self._part(partial(self._ask, SleepingEngine.wake_up, CACHE))
        except BaseException as error:
            said = self._sleep_again()
            if not isinstance(error, Exception):
                error.add_note(said)
                raise
            if isinstance(error, WeighbridgeError):
                raise FailedPrecondition(f"{error.message}; {said}", details=error.details, fix=error.fix) from error
            raise FailedPrecondition(f"{type(error).__name__}: {error}; {said}") from error
        return ColocatedUpdate(number, pushed, offloaded, woken, updated, computing)

    def sleep(self) -> None:
        """Put the engine to sleep before the trainer uses the GPU."""
        self._together(partial(self._ask, SleepingEngine.sleep, self._level))

    def _push(self, push: Callable[[], PushHandle]) -> int:
        number = push().wait(VersionState.READY).number
        self._ask(SleepingEngine.connect)
        self._ask(SleepingEngine.begin, number)
        return number

    def _wake_weights(self) -> Part:
        try:
            return self._part(partial(self._ask, SleepingEngine.wake_up, WEIGHTS))[1]
        except RanksFailed:  # this rank's engine is awake, and another rank's is not
            self._sleep_again()
            raise

    def _sleep_again(self) -> str:
        """Put an engine that may be half awake to sleep. Returns a message about the outcome."""
        self._quietly(SleepingEngine.wake_up, CACHE)  # vLLM 0.24 can put only awake engines to sleep
        try:
            self._ask(SleepingEngine.sleep, self._level)
        except Exception as error:
            return f"the engine could not be put to sleep again: {error}"
        serving = self._quietly(SleepingEngine.serving)
        if serving is None:
            return "the engine was put to sleep again"
        had = "no version" if serving.version is None else f"version {serving.version}"
        return f"the engine was put to sleep again, with {had}"

    def _ask(self, method: Callable[..., T], *arguments: Any) -> T | None:
        """Call the engine, if there is one on this rank."""
        if self._engine is None:
            return None
        found: T = getattr(self._engine, method.__name__)(*arguments)
        return found

    def _quietly(self, method: Callable[..., T], *arguments: Any) -> T | None:
        with suppress(Exception):
            return quietly(partial(self._ask, method, *arguments))
        return None

    def _part(self, step: Callable[[], T]) -> tuple[T, Part]:
        memory = self._memory or partial(used_bytes, _card())
        started = time.monotonic()
        with Peak(memory) as peak:
            found = self._together(step)
        return found, Part(time.monotonic() - started, peak.nbytes)

    def _together(self, step: Callable[[], T]) -> T:
        """Result of a step on this rank, once all ranks have run it.

        Raises this rank's error, or the failure of another rank.
        """
        if self._ranks.size == 1:
            return step()
        try:
            return agree(self._ranks, "another rank of the trainer has failed", step)
        except RanksFailed as failed:
            raised = failed.__cause__ or failed
        raise raised


class Peak:
    """Peak memory use during the context.

    Args:
        memory: returns the bytes in use; called in another thread every few milliseconds, and at the end.

    Attributes:
        nbytes: the observed peak.
    """

    def __init__(self, memory: Callable[[], int]) -> None:
        self.nbytes = 0
        self._memory = memory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> Self:
        """Begin sampling."""
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the last sample."""
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        self.nbytes = max(self.nbytes, self._memory())


def used_bytes(card: int | None = None) -> int:
    """Used bytes of a GPU, by all processes; of the calling thread's GPU if none is named. 0 if this process uses no
    GPU.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        return 0
    free, total = torch.cuda.mem_get_info(card)
    return total - free


def move(module: torch.nn.Module, device: torch.device | str, optimizer: Any = None) -> None:
    """Move a module (FSDP2 is supported) and its optimizer state to another device: off the GPU, or back.

    Args:
        module: the module; its parameters stay the same objects.
        device: target, such as ``cpu`` or ``cuda``.
        optimizer: a `torch.optim.Optimizer` of the module.
    """
    module.to(device)
    for state in () if optimizer is None else optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():  # step counts are not moved
                state[name] = value.to(device)


def _engine(
    engine: Any, model: str, server: str, lane: str | None, stale_drafter: StaleDrafter | None
) -> SleepingEngine | None:
    if engine is None:
        return None
    if isinstance(engine, str):
        return VllmServer(engine, model, server, lane=lane, when_asleep=WAIT, stale_drafter=stale_drafter)
    return LlmEngine(engine, ModelSource(model, server, lane), stale_drafter)


def _card() -> int | None:
    """GPU of the calling thread; other threads do not inherit it."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's own


def _offload(offload: Callable[[], object]) -> None:
    offload()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
