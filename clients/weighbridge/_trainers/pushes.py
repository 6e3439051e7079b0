"""Pushes of one trainer's client: the code that all methods that push share, and the state of one call."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from weighbridge._clients.connection import Connection
from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._clients.copying.copies import Copies, CopiesInCall
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.holding.policy import HoldPolicy, held, is_away
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options, say
from weighbridge._clients.pushing import Pusher, PushTerms
from weighbridge._core.layouts import Layout
from weighbridge._core.references import is_training
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.gathered_shards import GatheredShards, OpenPassing, held_layout, share_layout
from weighbridge._formats.megatron_state import WeightShards, as_registered, sharded_tensors
from weighbridge._formats.peft_models import merges_together
from weighbridge._formats.push_sources import OpenSource, cast_dtypes
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


class _Shards(Protocol):
    """The shards of a model that a rank holds, as one stream, with a tensor for each."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...


FoundT = TypeVar("FoundT", bound=_Shards)


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

    def shards(self, call: PushCall, layout: Layout, space: TensorSpace, open_source: OpenSource) -> PushHandle:
        """Push the shards of any layout; see `TrainerClient.push_shards`."""
        with self.on_terms(call):
            self._say(call)
            call.handle = self.pusher.push(
                call.opening, call.rank, layout, space, open_source, hold_seal=call.hold_seal, terms=call.terms,
                registration=call.registration,
            )  # fmt: skip
        return call.handle

    def weights(self, call: PushCall, weights: FolderWeights) -> PushHandle:
        """Push the weights of a folder; see `TrainerClient.push_folder`."""
        call.opening.cast_from.extend(weights.cast_from)
        return self.shards(call, weights.layout, TensorSpace.HUGGING_FACE, weights.open_source)

    def megatron(self, call: PushCall, trained: Any, cast: str, until: Any) -> PushHandle:
        """Push a sharded state dict of Megatron-core; see `TrainerClient.push`."""
        from weighbridge._trainers.states.megatron_training import training_tensors

        check_cast(cast)
        find = partial(self._weight_shards, call.opening.model, trained, cast)
        with self.on_terms(call):
            call.handle = self.tensors(
                call,
                TensorSpace.MEGATRON,
                find,
                until,
                lambda shards: training_tensors(shards.held, call.beside.optimizer),
            )
        return call.handle

    def state_dict(self, call: PushCall, trained: Any, cast: str, until: Any) -> PushHandle:
        """Push a torch model; see `TrainerClient.push_state_dict`."""
        from weighbridge._trainers.states.torch_training import training_tensors

        model, alone = call.opening.model, call.opening.ranks == 1
        with self.on_terms(call), self._known.of(model) as tensors:
            if merges_together(trained):
                self.pusher.meet(model, call.terms)
            find = partial(torch_shards, trained, tensors, cast=cast, whole=alone, of=model)
            call.handle = self.tensors(
                call, TensorSpace.HUGGING_FACE, find, until, lambda _: training_tensors(trained, call.beside.optimizer)
            )  # fmt: skip
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
            with self.pusher.telling([opening], rank, call.terms):
                if held is None:
                    shares = share_layout(tensors, rank, ranks)
                    given = partial(GatheredShards, rank=rank, ranks=ranks)
                else:
                    shares = held_layout(tensors, held)
                    given = partial(GatheredShards, rank=0, ranks=1, expected=shares.tensors)
            passed = OpenPassing(partial(given, passing, tensors, cast=cast), buffer_bytes)
            call.handle = self.pusher.push(opening, rank, shares, TensorSpace.HUGGING_FACE, passed, terms=call.terms)
        return call.handle

    def tensors(
        self,
        call: PushCall,
        space: TensorSpace,
        find_shards: Callable[[], FoundT],
        until: Any = None,
        training_tensors: Callable[[FoundT], TrainingTensors] | None = None,
    ) -> PushHandle:
        """Push a rank's tensors, and after them its training state if the caller gives one. If the tensors are refused,
        all ranks are notified.

        Args:
            call: the call, which has begun.
            space: space of the shards' names.
            find_shards: returns the shards of the model that the rank holds.
            until: see `TrainerClient.push`.
            training_tensors: returns the rank's tensors of model and optimizer, given these shards; None if no training
                state is pushed.
        """
        self._say(call)
        opening, behind, rank, terms = call.opening, call.behind, call.rank, call.terms
        state: TrainingState | None = None
        with ExitStack() as stack:
            with self.pusher.telling([opening, behind], rank, terms):
                copies = stack.enter_context(self._copies(until, call.beside))
                shards = find_shards()
                layout, tensors = shards.layout, shards.tensors
                self.pusher.begin(copies, opening.model, layout, tensors)
                if behind is not None and training_tensors is not None:
                    own = training_tensors(shards)
                    self.training.begin(copies, behind.model, own.layout, own.tensors)
                    state = training_state(own, rank, call.beside.state, call.beside.rank_state)
                opening.cast_from.extend(cast_dtypes(layout, tensors))
            source, copying = copies.source(tensors, self.pusher.staging)
            handle = self.pusher.push(
                opening,
                rank,
                layout,
                space,
                source,
                behind=behind,
                copying=copying,
                terms=terms,
                registration=call.registration,
            )
            if behind is None or state is None:
                return handle
            behind.at_least = handle.number
            try:
                copies.keep(state.tensors[-1:])  # the blob
                source, copying = copies.source(state.tensors, self.training.staging)
                handle.training = self.training.push(
                    behind, rank, state.layout, state.space, source, copying=copying, terms=terms.behind()
                )
            except Exception as error:
                error.add_note(f"This rank had already pushed the weights: {handle.model}@{handle.number}.")
                if not terms.hold.policy.warns:
                    raise
                handle.training = self._skipped(behind, "the training state of step", error)
            return handle

    def _say(self, call: PushCall) -> None:
        """Put the options of a call into its opening. If they are refused, the other ranks are notified."""
        with self.pusher.telling([call.opening, call.behind], call.rank, call.terms):
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
