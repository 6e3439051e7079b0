"""Pushes of one trainer's client: the code that all methods that push share, and the state of one call."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weighbridge._clients.connection import Connection
from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._clients.copying.copies import Copies, CopiesInCall
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.holding.policy import HoldPolicy, held, is_away
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options, say
from weighbridge._clients.pushing import Pusher, PushTerms
from weighbridge._core.layouts import Layout
from weighbridge._core.references import is_training, training_of
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.gathered_shards import ArrivingWeights, held_layout, share_layout
from weighbridge._formats.megatron_state import WeightShards, as_registered, sharded_tensors
from weighbridge._formats.peft_models import merges_together
from weighbridge._formats.push_sources import HeldShards, cast_dtypes
from weighbridge._formats.torch_state import check_cast, rank_and_world, torch_shards
from weighbridge._trainers.copies_until_step import StepGate
from weighbridge._trainers.known_tensors import KnownTensors
from weighbridge._trainers.training import Beside, opening_behind, training_state
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

if TYPE_CHECKING:
    import torch

    from weighbridge._trainers.states.training_state import TrainingState, TrainingTensors

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PushCall:
    """One call of a trainer that pushes.

    Attributes:
        opening: the request that opens the version.
        rank: number of the rank.
        options: see `TrainerClient.push`. Once the push has begun, the opening contains them too.
        registration: registration of the model, if the model may be unregistered or registered with another config.
        hold_seal: see `TrainerClient.push_shards`.
        beside: values that are pushed after the tensors, as a training state.
        terms: terms of the push, once it has begun.
        handle: handle of the push, once it was made or skipped.
    """

    opening: pb.OpenVersionRequest
    rank: int
    options: PushOptions
    registration: RegisterModelRequest | None = None
    hold_seal: bool = False
    beside: Beside[Mapping[str, Any]] = field(default_factory=Beside)
    terms: PushTerms = field(init=False)
    handle: PushHandle = field(init=False)

    @property
    def behind(self) -> pb.OpenVersionRequest | None:
        """The opening of the training state."""
        return opening_behind(self.opening) if self.beside.given else None


class Pushes:
    """Makes the pushes of one trainer's client.

    Args:
        connection: connection of the client.
        known: cache of the tensors of models.
        ahead_bytes: see `TrainerClient`.

    Attributes:
        pusher: pusher of weights.
        training: pusher of training states. It has its own slots and buffers, so that neither pusher waits for the
            other's bytes.
    """

    def __init__(self, connection: Connection, known: KnownTensors, ahead_bytes: int) -> None:
        self._connection = connection
        self._known = known
        self._ahead_bytes = ahead_bytes
        self.pusher, self.training = Pusher(connection), Pusher(connection)
        self._steps = StepGate()
        self._away = False

    def close(self) -> None:
        """Wait until all pushes have been delivered or have failed."""
        self.pusher.close()
        self.training.close()

    def call(
        self,
        model: str,
        step: int,
        run: str,
        rank: int | None,
        world_size: int | None,
        request_id: str | None,
        options: PushOptions,
        *,
        part: bool = False,
    ) -> PushCall:
        """Return a call that is about to push. ``part`` allows the push of a training state alone. Raises
        InvalidArgument and the errors of `check_options`.
        """
        check_options(options)
        if is_training(model) and not part:
            raise InvalidArgument(
                f"{model} takes only training states, which are pushed together with weights",
                fix=f"push to {model.partition(':')[0]}, with optimizer= or state=",
            )
        if "@" in model:
            raise InvalidArgument(
                f"{model!r} names a version, but a push creates a new one",
                fix=f"push to {model.partition('@')[0]!r}",
            )
        rank, ranks = rank_and_world(rank, world_size)
        try:
            opening = pb.OpenVersionRequest(
                model=model, step=operator.index(step), run=run, ranks=ranks, client_id=self._connection.client_id,
                request_id=request_id or f"{run}/{step}",
            )  # fmt: skip
        except (TypeError, ValueError) as error:  # protobuf's errors do not name the argument
            said = {"step": step, "run": run, "world_size": ranks, "request_id": request_id}
            raise InvalidArgument(
                f"a push cannot be opened with {', '.join(f'{name}={value!r}' for name, value in said.items())}",
                fix="step and world_size must be integers that are not negative, run and request_id must be strings",
            ) from error
        return PushCall(opening, rank, options)

    @contextmanager
    def on_terms(self, call: PushCall) -> Iterator[None]:
        """Context in which a push is made on the terms that its options set. All methods that push use it.

        If the push has as many ranks as torch.distributed, either all of them push, or none. With ``on_failure="warn"``
        an error ends only the block, and the call gets the handle of a skipped push.
        """
        policy, opening = HoldPolicy.of(call.options), call.opening
        agreement = RankAgreement.of_process_group(opening.model, opening.request_id, opening.ranks)
        if agreement is not None and agreement.refused_before:
            opening.request_id += f"#{agreement.refused_before}"
        call.terms = PushTerms(policy.begin(away=self._away), agreement)
        try:
            with held(call.terms.hold):
                yield
            self._away = False
        except Exception as error:
            if agreement is not None:
                agreement.fail(error)
            self._away = is_away(error)
            if not call.terms.hold.policy.warns:
                raise
            call.handle = self._skipped(opening, "step", error)

    def push_shards(self, call: PushCall, layout: Layout, space: TensorSpace, shards: HeldShards) -> PushHandle:
        """Push the shards of any layout; see `TrainerClient.push_shards`."""
        with self.on_terms(call):
            self._say(call)
            call.handle = self.pusher.push(
                call.opening, call.rank, layout, space, shards, hold_seal=call.hold_seal, terms=call.terms,
                registration=call.registration,
            )  # fmt: skip
        return call.handle

    def weights(self, call: PushCall, weights: FolderWeights) -> PushHandle:
        """Push the weights of a folder; see `TrainerClient.push_folder`."""
        call.opening.cast_from.extend(weights.cast_from)
        return self.push_shards(call, weights.layout, TensorSpace.HUGGING_FACE, weights.shards)

    def megatron(self, call: PushCall, trained: Any, cast: str, until: Any) -> PushHandle:
        """Push a sharded state dict of Megatron-core; see `TrainerClient.push`."""
        from weighbridge._trainers.states.megatron_training import training_tensors

        check_cast(cast)
        with self.on_terms(call), self.copying(call, until) as copies:
            with self.telling(call):
                shards = self._weight_shards(call.opening.model, trained, cast)
                self.begin(call, copies, shards.layout, shards.tensors)
                state = None
                if call.beside.given:
                    state = self._state(call, copies, training_tensors(shards.held, call.beside.optimizer))
            call.handle = self.tensors(
                call, TensorSpace.MEGATRON, shards.layout, shards.tensors, copies=copies, state=state
            )
        return call.handle

    def state_dict(self, call: PushCall, trained: Any, cast: str, until: Any) -> PushHandle:
        """Push a torch model; see `TrainerClient.push_state_dict`."""
        from weighbridge._trainers.states.torch_training import training_tensors

        model, alone = call.opening.model, call.opening.ranks == 1
        with self.on_terms(call), self._known.of(model) as tensors:
            if merges_together(trained):
                self.pusher.meet(model, call.terms)
            with self.copying(call, until) as copies:
                with self.telling(call):
                    shards = torch_shards(trained, tensors, cast=cast, whole=alone, of=model)
                    self.begin(call, copies, shards.layout, shards.tensors)
                    state = None
                    if call.beside.given:
                        state = self._state(call, copies, training_tensors(trained, call.beside.optimizer))
                call.handle = self.tensors(
                    call, TensorSpace.HUGGING_FACE, shards.layout, shards.tensors, copies=copies, state=state
                )
        return call.handle

    def gathered(
        self,
        call: PushCall,
        passing: Iterator[tuple[str, torch.Tensor]],
        cast: str,
        buffer_bytes: int,
        held: Iterable[str] | None,
    ) -> PushHandle:
        """Push whole tensors that an iterator yields; see `TrainerClient.push_gathered`."""
        check_cast(cast)
        opening, rank, ranks = call.opening, call.rank, call.opening.ranks
        with self.on_terms(call), self._known.of(opening.model) as tensors:
            self._say(call)
            with self.telling(call):
                shares = share_layout(tensors, rank, ranks) if held is None else held_layout(tensors, held)
            weights = ArrivingWeights(
                weights=passing,
                model=tensors,
                rank=rank if held is None else 0,
                ranks=ranks if held is None else 1,
                cast=cast,
                expected=None if held is None else shares.tensors,
                buffer_bytes=buffer_bytes,
            )
            call.handle = self.pusher.push(opening, rank, shares, TensorSpace.HUGGING_FACE, weights, terms=call.terms)
        return call.handle

    @contextmanager
    def copying(self, call: PushCall, until: Any = None) -> Iterator[Copies]:
        """Context of the copies of a call, which has begun.

        In it, a method finds the rank's shards and begins their copies (`begin`), inside `telling`, so that all ranks
        are notified if the tensors are refused. Then it calls `tensors`.

        Args:
            call: the call. Its options are put into its opening.
            until: see `TrainerClient.push`.
        """
        self._say(call)
        with ExitStack() as stack:
            with self.telling(call):
                copies = stack.enter_context(self._copies(until, call.beside))
            yield copies

    def telling(self, call: PushCall) -> AbstractContextManager[None]:
        """Context that notifies the other ranks of a call if its block raises."""
        return self.pusher.telling([call.opening, call.behind], call.rank, call.terms)

    def begin(self, call: PushCall, copies: Copies, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy the tensors of the shards that a rank holds, as far as it will probably push them."""
        self.pusher.begin(copies, call.opening.model, layout, tensors)

    def _state(self, call: PushCall, copies: Copies, own: TrainingTensors) -> TrainingState:
        """Begin to copy the tensors of a training state, and return the state."""
        self.training.begin(copies, training_of(call.opening.model), own.layout, own.tensors)
        return training_state(own, call.rank, call.beside.state, call.beside.rank_state)

    def tensors(
        self,
        call: PushCall,
        space: TensorSpace,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        *,
        copies: Copies,
        state: TrainingState | None = None,
    ) -> PushHandle:
        """Push a rank's tensors, and after them its training state if the call has one.

        Args:
            call: the call.
            space: space of the shards' names.
            layout: layout of the shards that the rank holds, as one stream.
            tensors: the tensor of each shard.
            copies: copies of the call.
            state: the rank's training state.
        """
        behind, rank, terms = call.behind, call.rank, call.terms
        with self.telling(call):
            call.opening.cast_from.extend(cast_dtypes(layout, tensors))
        shards, copying = copies.shards(layout, tensors, self.pusher.staging)
        handle = self.pusher.push(
            call.opening, rank, layout, space, shards,
            behind=behind, copying=copying, terms=terms, registration=call.registration,
        )  # fmt: skip
        if behind is None or state is None:
            return handle
        behind.at_least = handle.number
        try:
            copies.keep(state.tensors[-1:])  # the blob
            shards, copying = copies.shards(state.layout, state.tensors, self.training.staging)
            handle.training = self.training.push(
                behind, rank, state.layout, state.space, shards, copying=copying, terms=terms.behind()
            )
        except Exception as error:
            error.add_note(f"This rank had already pushed the weights: {handle.model}@{handle.number}.")
            if not terms.hold.policy.warns:
                raise
            handle.training = self._skipped(behind, "the training state of step", error)
        return handle

    def _say(self, call: PushCall) -> None:
        """Put the options of a call into its opening. If they are refused, the other ranks are notified."""
        with self.telling(call):
            say(call.opening, call.options)

    def _copies(self, until: Any, beside: Beside[Mapping[str, Any]]) -> Copies:
        """Copies of one call, of its weights and of its training state if it has one."""
        if until is not None:
            return self._steps.until(until, beside.optimizer)
        return CopiesAhead(self._ahead_bytes) if beside.given else CopiesInCall()

    def _skipped(self, opening: pb.OpenVersionRequest, what: str, error: Exception) -> PushHandle:
        """Log that a push has failed whose options allow this, and return its handle."""
        log.error("%s: %s %d was not pushed; the loop goes on. %s", opening.model, what, opening.step, error)
        return PushHandle.of_skipped(self._connection, opening.model, error)

    def _weight_shards(self, model: str, sharded_state_dict: Any, cast: str) -> WeightShards:
        held = sharded_tensors(sharded_state_dict)
        with self._known.registered(model, held.layout) as registered:
            return as_registered(held, registered, cast)


@contextmanager
def all_taken(passing: Iterator[object]) -> Iterator[None]:
    """Take the tensors that the block leaves, even if it fails. The other ranks gather them together with this rank,
    and would otherwise wait forever.
    """
    try:
        yield
    except Exception:
        for _ in passing:
            pass
        raise
    for _ in passing:
        pass
