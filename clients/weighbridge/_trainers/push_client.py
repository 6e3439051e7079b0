"""Client that pushes shards: what every way to push goes through in the end, and what of it goes together in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._clients.copying.copies import Copies, CopiesInCall
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.holding.policy import HoldPolicy, held, is_away
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, opening_of, say
from weighbridge._clients.pushing import Pusher, PushTerms
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.layouts import Layout
from weighbridge._core.references import is_training
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import OpenSource, StagingPool, cast_dtypes
from weighbridge._trainers.copies_until_step import StepGate
from weighbridge._trainers.restorer import RestoringClient
from weighbridge._trainers.training import TrainingPushes, training_state
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb

if TYPE_CHECKING:
    import torch

    from weighbridge._trainers.states.training_state import TrainingTensors

log = logging.getLogger(__name__)


class _Shards(Protocol):
    """What a rank holds of a model: the shards as one stream, and a tensor for each of them."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...


FoundT = TypeVar("FoundT", bound=_Shards)


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
        self._away = False
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
        push = partial(self._push_layout, opening, options, rank, layout, space, open_source, hold_seal)
        return self._on_terms(opening, options, push)

    def _push_layout(
        self,
        opening: pb.OpenVersionRequest,
        options: PushOptions,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        open_source: OpenSource,
        hold_seal: bool,
        terms: PushTerms,
    ) -> PushHandle:
        with self._pusher.telling([opening], rank, terms):
            say(opening, options)
        return self._pusher.push(opening, rank, layout, space, open_source, hold_seal=hold_seal, terms=terms)

    def _on_terms(
        self, opening: pb.OpenVersionRequest, options: PushOptions, push: Callable[[PushTerms], PushHandle]
    ) -> PushHandle:
        """Make a push on the terms that its options say. Every way to push goes through this.

        Where torch.distributed has as many ranks as the push, all of them push, or none.

        Args:
            opening: of the push.
            options: of the push.
            push: makes it.

        Returns:
            Its handle; with ``on_failure="warn"`` also of one that failed.

        Raises:
            WeighbridgeError: the push failed, and is not to be skipped.
        """
        policy = HoldPolicy.of(options)
        agreement = RankAgreement.of_process_group(opening.model, opening.request_id, opening.ranks)
        if agreement is not None and agreement.refused_before:
            opening.request_id += f"#{agreement.refused_before}"
        terms = PushTerms(policy.begin(away=self._away), agreement)
        try:
            with held(terms.hold):
                handle = push(terms)
        except Exception as error:
            if agreement is not None:
                agreement.fail(error)
            self._away = is_away(error)
            if not policy.warns:
                raise
            log.error("%s: step %d was not pushed; the loop goes on. %s", opening.model, opening.step, error)
            return PushHandle.of_skipped(self._connection, opening.model, error)
        self._away = False
        return handle

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

    def _push_tensors(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        space: TensorSpace,
        find_shards: Callable[[], FoundT],
        training_tensors: Callable[[FoundT], TrainingTensors],
        options: PushOptions,
        terms: PushTerms,
        *,
        until: Any,
        **training: Any,
    ) -> PushHandle:
        """Push a rank's tensors, and behind them its training state if anything of it is given. What is refused of them is told to all ranks.

        Args:
            opening: of the weights.
            rank: which rank.
            space: to which the names of the shards belong.
            find_shards: finds what the rank holds of the model.
            training_tensors: gives what the rank holds of model and optimizer, by these shards.
            terms: on which it is pushed.
            options, until, training: as for `TrainerClient.push`: ``optimizer``, ``state`` and ``rank_state``.
        """
        is_given = any(each is not None for each in training.values())
        told = [opening, self._training.opening(opening)] if is_given else [opening]
        with ExitStack() as stack:
            with self._pusher.telling(told, rank, terms):
                say(opening, options)
                copies = stack.enter_context(self._copies(until, training["optimizer"], is_given))
                shards = find_shards()
                layout, tensors = shards.layout, shards.tensors
                copies.begin(self._pusher.expected(opening.model, layout, tensors), self._ahead)
                begin = partial(self._training.begin, copies, opening.model)
                state = training_state(partial(training_tensors, shards), rank, **training, begin=begin)
                opening.cast_from.extend(cast_dtypes(layout, tensors))

            def weights(behind: pb.OpenVersionRequest | None) -> PushHandle:
                source, copying = copies.source(tensors, self._staging)
                return self._pusher.push(
                    opening, rank, layout, space, source, behind=behind, copying=copying, terms=terms
                )

            return self._training.beside(weights, opening, rank, state, copies, terms)

    def _copies(self, until: Any, optimizer: Any, beside: bool) -> Copies:
        """How one call copies what it pushes: weights, and perhaps a training state beside them."""
        if until is not None:
            return self._steps.until(until, optimizer)
        return CopiesAhead(self._ahead_bytes) if beside else CopiesInCall()
