"""Weight updates of RL frameworks: the ranks that train push a version, and the workers of rollouts pull it.

A framework gives both sides the ticket of an update, and nothing about the other side. The version's metadata contains
the ticket. A worker finds the version by its ticket while it is still being pushed, and learns at once if the push
fails.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import Version, VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.aio.client import AsyncEngineClient
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, NotFound
from weighbridge.follow.engines import StaleDrafter, stale_drafter_of
from weighbridge.integrations.engine_rank.source import ModelSource

if TYPE_CHECKING:
    import torch

TICKET = "weighbridge/update"
"""Metadata key of a version for the ticket of its update."""
_NEWEST = 16
"""Number of newest versions that are searched for an update."""
_PAUSES = (0.05, 1.0)
"""Seconds between two searches: initially, and at most."""
_LOOK_SECONDS = 15.0
"""Seconds to wait for a version before checking again whether its update is superseded."""


_BUFFER_BYTES = (2 << 20, 256 << 20)
"""Buffer size of a training rank in bytes: minimum and maximum."""


def buffers_within(bucket_bytes: int) -> int:
    """Buffer bytes of a push whose total need is limited to a bucket.

    The other half of the bucket is left for data that gRPC holds.
    """
    least, most = _BUFFER_BYTES
    return min(max(bucket_bytes // 2, least), most)


@dataclass(frozen=True)
class UpdateSettings(ModelSource):
    """Settings that training ranks and engines need, common to all RL frameworks.

    The adapter for each framework adds its own.

    Attributes:
        engine_server: how engines and rollouts reach the service, if not as trainers do.
        hf_dir: folder with ``config.json`` and the tokenizer, by which the model is registered; not needed if it is
            registered.
        dtype: dtype to register the model with, such as ``bf16``; by default the dtype in the folder's config.
        run: name of the training run; part of the versions' lineage.
        cast: which casts to the registered dtype a push may make, as for `TrainerClient.push_state_dict`.
    """

    engine_server: str | None = None
    hf_dir: str | Path | None = None
    dtype: str = ""
    run: str = "default"
    cast: str = "allow"

    @property
    def of_engines(self) -> ModelSource:
        """The model as engines and rollouts reach it."""
        return ModelSource(self.model, self.engine_server or self.server, self.lane, self.retry_seconds)

    def trainer(self) -> TrainerClient:
        """A client of a rank that trains."""
        return TrainerClient(self.server, run=self.run, lane=self.lane, retry_seconds=self.retry_seconds)


@dataclass(frozen=True)
class PluginSettings(UpdateSettings):
    """Settings for frameworks whose engines run weighbridge's plug-in and fetch versions themselves.

    Attributes:
        stale_drafter: policy for updates that leave the drafter of speculative decoding behind: engines ``refuse`` or
            ``allow`` them; None keeps the policy that the engines were started with.
    """

    stale_drafter: str | None = None

    def __post_init__(self) -> None:
        if self.stale_drafter is not None:
            stale_drafter_of(self.stale_drafter)

    @property
    def drafter(self) -> StaleDrafter | None:
        """The same policy, as the type that engine drivers accept."""
        return None if self.stale_drafter is None else stale_drafter_of(self.stale_drafter)

    @property
    def init_info(self) -> dict[str, str]:
        """Settings from which an engine learns where versions come from."""
        said = {} if self.stale_drafter is None else {"stale_drafter": self.stale_drafter}
        return {**self.of_engines.init_info, **said}


@dataclass(frozen=True)
class WorkerSettings(UpdateSettings):
    """Settings of a worker that pushes or pulls what its framework hands to it.

    Attributes:
        device: device on which rollouts receive their tensors; by default the device that the framework uses.
        timeout_seconds: how long rollouts wait for the training ranks to begin their push.
    """

    device: str | None = None
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """An update, as workers receive it.

    Attributes:
        ticket: id that the ranks that train give the version.
        version: its number, or a ref, if that is known; the version is then not searched for.
    """

    ticket: str
    version: str | int | None = None

    @staticmethod
    def new() -> WeightUpdate:
        """Make an update with a new ticket."""
        return WeightUpdate(uuid.uuid4().hex)


@contextmanager
def taken_to_the_end(weights: Iterable[object]) -> Iterator[None]:
    """If the block fails, consume the remaining gathered tensors; otherwise the other ranks would wait for this one
    forever.
    """
    try:
        yield
    except Exception:
        for _ in weights:
            pass
        raise


class UpdateSender:
    """A training rank.

    Args:
        settings: where and how it pushes.

    Attributes:
        settings: as given.
    """

    def __init__(self, settings: UpdateSettings) -> None:
        self.settings = settings
        self._model = settings.model
        self._client = settings.trainer()
        self._registered = False
        self._sent = 0

    def register(self) -> None:
        """Register the model if a folder was given and the model is not registered yet; as
        `TrainerClient.register_model`.
        """
        folder = self.settings.hf_dir
        if folder is not None and not self._registered:
            self._client.register_model(self._model, folder, dtype=self.settings.dtype)
            self._registered = True

    def wait_registered(self, timeout: float) -> None:
        """Return when another rank has registered the model.

        Raises:
            NotFound: no rank has, within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        pause, longest = _PAUSES
        while True:
            try:
                self._client.model(self._model)
            except NotFound:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def send(
        self,
        update: WeightUpdate | None,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        step: int | None,
        rank: int,
        ranks: int,
        buffer_bytes: int,
        held: Iterable[str] | None = None,
    ) -> PushHandle:
        """Push this rank's share of tensors that all ranks gather. All tensors are consumed, even if the push fails.

        Args:
            update: the update, the same on all ranks; None if the framework gives the ranks no ticket: they then find
                each other by the step.
            weights: name and whole tensor of each.
            step: the training step; by default the number of updates that this rank has sent.
            rank, ranks: this rank, and the number of ranks.
            buffer_bytes: host memory for data that is sent over gRPC.
            held: as for `TrainerClient.push_gathered`.

        Raises:
            WeighbridgeError: as `TrainerClient.push_gathered`.
        """
        self._sent += 1
        return self._client.push_gathered(
            self._model,
            weights,
            step=self._sent if step is None else step,
            rank=rank,
            world_size=ranks,
            request_id=None if update is None else update.ticket,
            cast=self.settings.cast,
            buffer_bytes=buffer_bytes,
            held=held,
            metadata={} if update is None else {TICKET: update.ticket},
        )

    def close(self) -> None:
        """Wait until every push has arrived or failed."""
        self._client.close()


class UpdateReceiver:
    """A rollout worker.

    Args:
        source: service and model.
        timeout: seconds to wait for the training ranks to begin their push.
    """

    def __init__(self, source: ModelSource, *, timeout: float) -> None:
        self._source = source
        self._timeout = timeout

    async def receive(
        self, update: WeightUpdate, device: torch.device, superseded: Callable[[], bool]
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait until an update is complete, and yield its tensors.

        Each is fetched once the previous one was consumed; on GPUs about 64 MB earlier.

        Args:
            update: which one.
            device: device for the tensors. On the CPU they are views of the version if it is stored on this machine.
            superseded: whether no worker waits for the update any more.

        Raises:
            VersionFailed: the version could not be completed; states why.
            NotFound: the model does not exist, or the service was restarted and has lost the version.
            DeadlineExceeded: the training ranks did not begin in time.
            FailedPrecondition: the update is superseded.
        """
        source = self._source
        async with AsyncEngineClient(source.server, lane=source.lane, retry_seconds=source.retry_seconds) as client:
            version = update.version
            if version is None:
                version = await self._ready(client, update, superseded)
            async with aclosing(_tensors(client, source.model, version, device)) as tensors:
                async for each in tensors:
                    yield each

    async def _ready(self, client: AsyncEngineClient, update: WeightUpdate, superseded: Callable[[], bool]) -> int:
        number = await self._found(client, update, superseded)
        while True:
            try:
                await client.wait_for(self._source.model, number, VersionState.READY, timeout=_LOOK_SECONDS)
            except DeadlineExceeded:
                _check(superseded)
                continue
            return number

    async def _found(self, client: AsyncEngineClient, update: WeightUpdate, superseded: Callable[[], bool]) -> int:
        """Number of the version that belongs to an update.

        It is found by its ticket, because any training rank may have opened it.
        """
        model = self._source.model
        deadline = time.monotonic() + self._timeout
        pause, longest = _PAUSES
        while True:
            for version in await client.versions(model, include_invisible=True, limit=_NEWEST):
                if version.metadata.get(TICKET) == update.ticket:
                    return version.number
            _check(superseded)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the ranks that train have not begun to push {model} within {self._timeout:g} s",
                    fix="see the reason in their logs; if they need longer before they push, raise timeout_seconds",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)


def _check(superseded: Callable[[], bool]) -> None:
    if superseded():
        raise FailedPrecondition("this update was cancelled: a newer one has begun")


class UpdateWorker:
    """One worker of a job whose framework makes each worker push or pull: a training rank or a rollout worker.

    Args:
        settings: of all workers.

    Attributes:
        pushed: the newest push of this worker.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.pushed: PushHandle | None = None
        self._settings = settings
        self._rank, self._ranks = 0, 1

    async def _push(
        self, update: WeightUpdate, weights: Iterable[tuple[str, torch.Tensor]], step: int | None, bucket: int
    ) -> Version:
        """Push this worker's share of each tensor, in the calling thread, and wait until rollouts can pull the version.

        Args:
            update, weights, step: as for `UpdateSender.send`.
            bucket: bytes that the push may use in addition to the tensor that it receives.

        Raises:
            As `TrainerClient.push_gathered`, and VersionFailed: the version could not be completed.
        """
        self.pushed = handle = self._sender.send(
            update,
            weights,
            step=step,
            rank=self._rank,
            ranks=self._ranks,
            buffer_bytes=buffers_within(bucket),
        )
        return await asyncio.to_thread(handle.wait, VersionState.READY)

    @cached_property
    def _sender(self) -> UpdateSender:
        return UpdateSender(self._settings)

    @cached_property
    def _receiver(self) -> UpdateReceiver:
        return UpdateReceiver(self._settings.of_engines, timeout=self._settings.timeout_seconds)


async def _tensors(
    client: AsyncEngineClient, model: str, version: str | int, device: torch.device
) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    import torch

    pull = client.pull(model, version)
    if device.type == "cpu":
        async for each in pull:
            yield each
        return
    layout = (await pull.plan()).layout

    def tensor_for(index: int) -> torch.Tensor:
        shard = layout.placements[index].shard
        dtype = layout.tensors[shard.tensor].dtype.torch
        return torch.empty(shard.box.extent, dtype=dtype, device=device)

    async with aclosing(pull.filled(tensor_for)) as filled:
        async for each in filled:
            yield each
