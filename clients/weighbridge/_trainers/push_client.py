"""Client that pushes shards: what every way to push goes through in the end, and what of it goes together in one call."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._clients.copying.copies import Copies, CopiesInCall
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.holding.policy import HoldPolicy, held, is_away
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, say
from weighbridge._clients.pushing import Pusher, PushTerms
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.layouts import Layout
from weighbridge._core.references import is_training
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import OpenSource, cast_dtypes
from weighbridge._trainers.copies_until_step import StepGate
from weighbridge._trainers.restorer import RestoringClient
from weighbridge._trainers.training import opening_behind, training_state
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

if TYPE_CHECKING:
    import torch

    from weighbridge._trainers.states.training_state import TrainingState, TrainingTensors

log = logging.getLogger(__name__)


class _Shards(Protocol):
    """What a rank holds of a model: the shards as one stream, and a tensor for each of them."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...


class PushCall:
    """One call of a trainer that pushes.

    Attributes:
        terms: on which.
        handle: of the push, once that was made or skipped.
    """

    handle: PushHandle

    def __init__(self, terms: PushTerms) -> None:
        self.terms = terms


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
        self._pusher = Pusher(self._connection)
        self._steps = StepGate()
        self._away = False
        # slots and buffers of their own: neither weights nor training states wait for the other's bytes
        self._training = Pusher(self._connection)

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
        return self._push_layout(opening, rank, layout, space, open_source, options, hold_seal=hold_seal)

    def _push_layout(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        open_source: OpenSource,
        options: PushOptions,
        *,
        hold_seal: bool = False,
        registration: RegisterModelRequest | None = None,
    ) -> PushHandle:
        """Push the shards of a layout to the version that an opening says.

        Args:
            opening, rank, layout, space, open_source, options, hold_seal: as for `push_shards`.
            registration: of the model, if it may not be registered, or be registered otherwise.
        """
        with self._on_terms(opening, options) as call:
            with self._pusher.telling([opening], rank, call.terms):
                say(opening, options)
            call.handle = self._pusher.push(
                opening, rank, layout, space, open_source, hold_seal=hold_seal, terms=call.terms, registration=registration,
            )  # fmt: skip
        return call.handle

    @contextmanager
    def _on_terms(self, opening: pb.OpenVersionRequest, options: PushOptions) -> Iterator[PushCall]:
        """In the block, make a push on the terms that its options say. Every way to push goes through this.

        Where torch.distributed has as many ranks as the push, all of them push, or none. With ``on_failure="warn"`` an error ends the block alone, and the
        call has the handle of a push that was skipped.

        Args:
            opening: of the push.
            options: of the push.
        """
        policy = HoldPolicy.of(options)
        agreement = RankAgreement.of_process_group(opening.model, opening.request_id, opening.ranks)
        if agreement is not None and agreement.refused_before:
            opening.request_id += f"#{agreement.refused_before}"
        call = PushCall(PushTerms(policy.begin(away=self._away), agreement))
        try:
            with held(call.terms.hold):
                yield call
            self._away = False
        except Exception as error:
            if agreement is not None:
                agreement.fail(error)
            self._away = is_away(error)
            if not call.terms.hold.policy.warns:
                raise
            call.handle = self._skipped(opening, "step", error)

    def _skipped(self, opening: pb.OpenVersionRequest, what: str, error: Exception) -> PushHandle:
        """The handle of a push that has failed, and may."""
        log.error("%s: %s %d was not pushed; the loop goes on. %s", opening.model, what, opening.step, error)
        return PushHandle.of_skipped(self._connection, opening.model, error)

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
        """The request that opens a push, before options are said. Raises InvalidArgument."""
        if is_training(model) and not part:
            raise InvalidArgument(
                f"{model} takes training states alone, which are pushed beside weights",
                fix=f"push to {model.partition(':')[0]}, with optimizer= or state=",
            )
        if "@" in model:
            raise InvalidArgument(
                f"{model!r} names a version, and a push makes one", fix=f"push to {model.partition('@')[0]!r}"
            )
        run = self.run if run is None else run
        try:
            return pb.OpenVersionRequest(
                model=model, step=operator.index(step), run=run, ranks=ranks, client_id=self._connection.client_id,
                request_id=request_id or f"{run}/{step}",
            )  # fmt: skip
        except (TypeError, ValueError) as error:  # protobuf's speak of no argument by name
            said = {"step": step, "run": run, "world_size": ranks, "request_id": request_id}
            raise InvalidArgument(
                f"a push cannot be opened with {', '.join(f'{name}={value!r}' for name, value in said.items())}",
                fix="step and world_size are integers that are not negative, run and request_id are texts",
            ) from error

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
        optimizer: Any,
        state: Mapping[str, Any] | None,
        rank_state: Mapping[str, Any] | None,
        registration: RegisterModelRequest | None = None,
    ) -> PushHandle:
        """Push a rank's tensors, and behind them its training state if anything of it is given. What is refused of them is told to all ranks.

        Args:
            opening: of the weights.
            rank: which rank.
            space: to which the names of the shards belong.
            find_shards: finds what the rank holds of the model.
            training_tensors: gives what the rank holds of model and optimizer, by these shards.
            terms: on which it is pushed.
            options, until, optimizer, state, rank_state: as for `TrainerClient.push`.
            registration: of the model, if it may not be registered, or be registered otherwise.
        """
        behind: TrainingState | None = None
        told = [opening]
        if not (optimizer is state is rank_state is None):
            told.append(opening_behind(opening))
        with ExitStack() as stack:
            with self._pusher.telling(told, rank, terms):
                say(opening, options)
                copies = stack.enter_context(self._copies(until, optimizer, len(told) > 1))
                shards = find_shards()
                layout, tensors = shards.layout, shards.tensors
                self._pusher.begin(copies, opening.model, layout, tensors)
                if len(told) > 1:
                    own = training_tensors(shards)
                    self._training.begin(copies, told[1].model, own.layout, own.tensors)
                    behind = training_state(own, rank, state, rank_state)
                opening.cast_from.extend(cast_dtypes(layout, tensors))
            second = None if behind is None else opening_behind(opening)
            source, copying = copies.source(tensors, self._pusher.staging)
            handle = self._pusher.push(
                opening, rank, layout, space, source, behind=second, copying=copying, terms=terms, registration=registration,
            )  # fmt: skip
            if behind is None or second is None:
                return handle
            second.at_least = handle.number
            try:
                copies.keep(behind.tensors[-1:])  # the blob
                source, copying = copies.source(behind.tensors, self._training.staging)
                handle.training = self._training.push(
                    second, rank, behind.layout, behind.space, source, copying=copying, terms=terms.behind()
                )
            except Exception as error:
                error.add_note(f"This rank had pushed the weights by then: {handle.model}@{handle.number}.")
                if not terms.hold.policy.warns:
                    raise
                handle.training = self._skipped(second, "the training state of step", error)
            return handle

    def _copies(self, until: Any, optimizer: Any, beside: bool) -> Copies:
        """How one call copies what it pushes: weights, and perhaps a training state beside them."""
        if until is not None:
            return self._steps.until(until, optimizer)
        return CopiesAhead(self._ahead_bytes) if beside else CopiesInCall()
