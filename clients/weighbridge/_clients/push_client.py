"""Client that pushes shards: what every way to push goes through in the end, and what of it goes together in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._clients.copying.behind import StepGate
from weighbridge._clients.copying.copies import Copies, CopiesInCall
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, opening_of, say
from weighbridge._clients.pushing import Pusher
from weighbridge._clients.restorer import RestoringClient
from weighbridge._clients.training import TrainingPushes
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.layouts import Layout
from weighbridge._core.references import is_training
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import OpenSource, StagingPool
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb

if TYPE_CHECKING:
    import torch


class PushingClient(RestoringClient):
    """The base of clients that push; see `TrainerClient` for the arguments."""

    def __init__(
        self,
        server: str | None = None,
        *,
        run: str = "default",
        ahead_bytes: int = 2 << 30,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        super().__init__(server, **options)
        self.run = run
        self._ahead_bytes = ahead_bytes
        self._ahead = StagingPool()
        self._staging = StagingPool()
        self._pusher = Pusher(self._connection)
        self._steps = StepGate()
        self._training = TrainingPushes(self._connection)

    def push_shards(
        self,
        model: str,
        layout: Layout,
        space: TensorSpace,
        open_source: OpenSource,
        *,
        step: int,
        rank: int,
        world_size: int,
        run: str | None = None,
        request_id: str | None = None,
        hold_seal: bool = False,
        cast_from: Iterable[str] = (),
        **options: Unpack[PushOptions],
    ) -> PushHandle:
        """Push the shards of any layout; what `push` and `push_folder` do in the end.

        Args:
            model: ``namespace/name``, registered before.
            layout: the shards this rank holds, as one stream.
            space: ``TensorSpace.MEGATRON`` or ``TensorSpace.HUGGING_FACE``, to which the names belong.
            open_source: is called for the bytes of the shards that this rank is to push; and, for those that other ranks hold, too, before
                that to compare them.
            step, rank, world_size, run, request_id, options: as for `push`.
            hold_seal: leave it to `PushHandle.seal` to say that this rank has pushed everything: until then no version becomes visible.
            cast_from: safetensors' names of the dtypes that the source casts from; the version's manifest has them.
        """
        opening = self._opening(model, step, run, world_size, request_id, part=True)
        opening.cast_from.extend(cast_from)
        with self._pusher.telling([opening], rank):
            say(opening, options)
        return self._pusher.push(opening, rank, layout, space, open_source, hold_seal=hold_seal)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed, then close the connection."""
        self._pusher.close()
        self._training.close()
        super().close()

    def _opening(
        self,
        model: str,
        step: int,
        run: str | None,
        ranks: int,
        request_id: str | None,
        *,
        part: bool = False,
    ) -> pb.OpenVersionRequest:
        run, client_id = self.run if run is None else run, self._connection.client_id
        if is_training(model) and not part:
            raise InvalidArgument(
                f"{model} takes training states alone, which are pushed beside weights",
                fix=f"push to {model.partition(':')[0]}, with optimizer= or state=",
            )
        return opening_of(model, step=step, run=run, ranks=ranks, client_id=client_id, request_id=request_id)

    def _telling_both(
        self, opening: pb.OpenVersionRequest, rank: int, *training: object
    ) -> AbstractContextManager[None]:
        """As `Pusher.telling`, of weights and of the training state beside them if anything of it is given."""
        both = [opening]
        if any(each is not None for each in training):
            both.append(self._training.opening(opening))
        return self._pusher.telling(both, rank)

    def _copies(self, until: Any, optimizer: Any, *values: object) -> Copies:
        """How one call copies what it pushes: weights, and a training state beside them if anything of it is given."""
        if until is not None:
            return self._steps.until(until, optimizer)
        if all(each is None for each in (optimizer, *values)):
            return CopiesInCall()
        return CopiesAhead(self._ahead_bytes)

    def _push_of(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        tensors: Sequence[torch.Tensor],
        copies: Copies,
    ) -> Callable[[pb.OpenVersionRequest | None], PushHandle]:
        """A push of tensors that is made when it is called, with the opening of what comes behind."""

        def push(behind: pb.OpenVersionRequest | None) -> PushHandle:
            source, copying = copies.source(tensors, self._staging)
            return self._pusher.push(opening, rank, layout, space, source, behind=behind, copying=copying)

        return push
