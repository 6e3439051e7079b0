"""Control calls of a push as steps without I/O: open, declare, state, seal, abort. Also queries for the shards of a
rank and the tensors of a model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from weighbridge._clients.calls import model_calls
from weighbridge._clients.calls.steps import Pause, Steps, call_method
from weighbridge._core.layouts import Layout, TensorSpec, WeightLinks
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.metadata import BASE, OTHER_WRITER
from weighbridge._core.pauses import DICE
from weighbridge._core.references import Reference
from weighbridge._core.resources import Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.waits import Reminder, ranks_text
from weighbridge._transport import wire
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, NotFound, VersionFailed
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

log = logging.getLogger(__name__)

_DECLARE_SECONDS = 600.0
"""Maximum time for which a rank waits for the other ranks to declare their layouts."""
_DECLARE_CALL_SECONDS = 10.0
"""Maximum wait of one call before the client repeats it."""
_DECLARE_CALL_FIRST = 1.0
"""Wait of the first call, which is also the minimum. Each later call waits twice as long as the previous one.

The first calls are short because a rank that cannot push reports this early, and the other ranks learn of it between
calls. Near the end of the wait, calls are short again, so that the service can report the absent ranks in time."""

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["CheckpointService"])


def open_version(
    opening: pb.OpenVersionRequest,
    registration: RegisterModelRequest | None = None,
    called: float | None = None,
) -> Steps[Version]:
    """Open a version, or find the version that another rank of the push has opened.

    Logs a warning if another job also pushes the model.

    Args:
        opening: the request, which identifies the push.
        registration: registration of the model. The client sends it only if the service refuses the opening, because
            the model is not registered or is registered with another config. So later versions of a model need only one
            call.
        called: time at which the trainer called push, by the monotonic clock; None to omit it.
    """
    age = None if called is None else partial(_called, called)
    try:
        answer = yield from _call("OpenVersion", opening, latest=age)
    except (NotFound, FailedPrecondition) as error:
        # The service reports another rank's refusal once to each rank: a second opening would open a new version.
        if registration is None or isinstance(error, VersionFailed):
            raise
        # if the opening was refused for another reason, this raises the error
        yield from model_calls.register_model(registration)
        answer = yield from _call("OpenVersion", opening, latest=age)
    opened = wire.version_from_proto(answer.version)
    if OTHER_WRITER in opened.metadata and OTHER_WRITER not in opening.metadata:
        log.warning(
            "%s: another job pushes this model, too: between this job's last version and this one it has pushed %s. "
            "End one of them, or push to two models",
            opened,
            opened.metadata[OTHER_WRITER],
        )
    return opened


def _called(at: float) -> pb.OpenVersionRequest:
    """Return a part of the opening: the age of the trainer's call, which was made at this time of the monotonic
    clock.
    """
    return pb.OpenVersionRequest(call_age_seconds=time.monotonic() - at)


def declare(
    header: pb.PushHeader,
    layout: Layout,
    space: TensorSpace,
    *,
    within: float = math.inf,
    meanwhile: Callable[[], object] = lambda: None,
) -> Steps[pb.DeclareLayoutResponse]:
    """Declare the layout of a rank, and wait until all ranks have declared theirs. Return the shards that the rank must
    push, and their destinations.

    Args:
        header: version and rank.
        layout: the shards that the rank holds.
        space: the space of tensor names in the layout.
        within: maximum wait in seconds, if it is shorter than the default.
        meanwhile: called between the calls of the wait. Its exceptions end the wait.

    Raises:
        DeadlineExceeded: not all ranks have declared in time (names the absent ones).
    """
    request = pb.DeclareLayoutRequest(
        model=header.model, number=header.number, rank=header.rank, client_id=header.client_id, digest=layout.digest,
    )  # fmt: skip
    give_up, reminder = time.monotonic() + min(within, _DECLARE_SECONDS), Reminder()
    absent: Sequence[int] = ()
    longest = _DECLARE_CALL_FIRST
    while True:
        left = give_up - time.monotonic()
        seconds = min(longest, max(left / 2, _DECLARE_CALL_FIRST))
        longest = min(2 * longest, _DECLARE_CALL_SECONDS)
        try:
            response: pb.DeclareLayoutResponse = yield from _call("DeclareLayout", request, seconds)
        except DeadlineExceeded as error:  # the service is too busy to respond
            if time.monotonic() < give_up:
                continue
            if absent:
                raise _not_declared(header, absent) from None
            raise DeadlineExceeded(
                (
                    f"{header.model}@{header.number}: the service did not report in time whether "
                    "all ranks have declared their layout"
                ),
                details=[error.message],
                fix="check whether the service is overloaded; or raise max_hold_s",
            ) from error
        if response.layout_needed:
            request.layout.CopyFrom(wire.layout_to_proto(layout, space))
        elif response.retry_after_ms:
            meanwhile()
            absent, left = list(response.absent_ranks), give_up - time.monotonic()
            if left <= 0:
                raise _not_declared(header, absent)
            if absent and (waited := reminder.due()) is not None:
                log.warning(
                    "%s@%d: for %s, waits for %s to declare",
                    header.model,
                    header.number,
                    readable_duration(waited, rough=True),
                    ranks_text(absent),
                )
            request.ClearField("layout")  # the service has it now
            pause = response.retry_after_ms / 1000 * DICE.uniform(0.75, 1.25)  # staggers the ranks
            yield Pause(min(pause, left))
        else:
            return response


def _not_declared(header: pb.PushHeader, absent: Sequence[int]) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{header.model}@{header.number}: not all ranks have declared their layout in time",
        details=[f"rank {rank}" for rank in absent],
        fix="call push on every rank with the same step, run and world_size; or raise max_hold_s",
    )


def refuse(opening: pb.OpenVersionRequest, rank: int, reason: str) -> Steps[None]:
    """Notify all other ranks of a push that this rank cannot take part: find the version of the push, and abort it.

    Raises:
        AlreadyExists: the rank already takes part, through another process or an earlier call.
    """
    bare = pb.OpenVersionRequest()
    bare.CopyFrom(opening)
    for said in (
        "metadata",
        "candidate",
        "allow_nonfinite",
    ):  # one of these may be the reason for the refusal
        bare.ClearField(said)
    if BASE in opening.metadata:  # without a base the service does not open a version of an adapter
        bare.metadata[BASE].CopyFrom(opening.metadata[BASE])
    opened = yield from open_version(bare)
    if not opened.state.visible:
        yield from abort(opening.model, opened.number, reason, refused=opening.client_id, refused_rank=rank)


def received(header: pb.PushHeader) -> Steps[list[tuple[int, int]]]:
    """Return the ranges of a rank's stream that have arrived."""
    request = pb.GetPushStateRequest(model=header.model, number=header.number, rank=header.rank)
    state = yield from _call("GetPushState", request)
    return [(each.start, each.end) for each in state.received]


def seal(
    header: pb.PushHeader,
    replicas: Sequence[pb.ReplicaChecksum] = (),
    *,
    nonfinite_elements: int | None = None,
) -> Steps[None]:
    """Seal a rank, after it has pushed all its bytes.

    Args:
        header: version and rank.
        replicas: checksums of the shards that other ranks hold too.
        nonfinite_elements: number of NaN or infinite elements that the rank has pushed; None if it has not counted
            them.
    """
    yield from _call(
        "SealRank",
        pb.SealRankRequest(
            model=header.model,
            number=header.number,
            rank=header.rank,
            client_id=header.client_id,
            replicas=replicas,
            nonfinite_elements=nonfinite_elements,
        ),
    )


def abort(
    model: str, version: str | int | None, reason: str, *, refused: str = "", refused_rank: int | None = None
) -> Steps[Version]:
    """Abort a version.

    Args:
        model: the model.
        version: number of the version; None if ``model`` names it.
        reason: reason that the ranks of the push receive.
        refused: ID of a process that cannot take part, so that ranks that have not called yet also receive the reason.
        refused_rank: rank of that process, if the rank was refused before it declared a layout.
    """
    meant = Reference.of(model, version)
    request = pb.AbortVersionRequest(
        model=meant.model,
        number=meant.number,
        reason=reason,
        client_id=refused,
        refused_rank=refused_rank,
    )
    return wire.version_from_proto((yield from _call("AbortVersion", request)).version)


def describe_shards(model: str, rank: MegatronRank) -> Steps[Layout]:
    """Return the shards that a Megatron-core rank holds."""
    request = pb.DescribeShardsRequest(
        model=model,
        tensor_parallel_rank=rank.tp[0], tensor_parallel_size=rank.tp[1],
        pipeline_parallel_rank=rank.pp[0], pipeline_parallel_size=rank.pp[1],
        expert_parallel_rank=rank.ep[0], expert_parallel_size=rank.ep[1],
        expert_tensor_parallel_rank=rank.etp[0], expert_tensor_parallel_size=rank.etp[1],
    )  # fmt: skip
    return wire.layout_from_proto((yield from _call("DescribeShards", request)).layout)


def registered_specs(model: str, specs: Iterable[TensorSpec]) -> Steps[Mapping[str, TensorSpec]]:
    """Return the specs of a trainer's tensors that belong to the model, by Megatron-core's names, with the model's
    registered dtypes.
    """
    held = wire.layout_to_proto(Layout.stream(specs, []), TensorSpace.MEGATRON)
    request = pb.DescribeShardsRequest(model=model, tensors=held, tensor_parallel_size=1, pipeline_parallel_size=1)
    return wire.layout_from_proto((yield from _call("DescribeShards", request)).layout).tensors


def weight_links(model: str, specs: Iterable[TensorSpec]) -> Steps[WeightLinks]:
    """Return links from the elements of a trainer's tensors to those of the model.

    Tensors that the model does not have are omitted.
    """
    held = wire.layout_to_proto(Layout.stream(specs, []), TensorSpace.MEGATRON)
    request = pb.DescribeShardsRequest(
        model=model, tensors=held, with_links=True, tensor_parallel_size=1, pipeline_parallel_size=1
    )
    response = yield from _call("DescribeShards", request)
    sources = wire.layout_from_proto(response.layout).tensors
    targets = wire.layout_from_proto(response.targets).tensors
    links = wire.links_from_proto(response.links, list(sources), list(targets))
    return WeightLinks(sources, targets, tuple(links))


def describe_tensors(model: str) -> Steps[Layout]:
    """Return a layout of all whole tensors of a model, by Hugging Face's names."""
    request = pb.DescribeShardsRequest(
        model=model,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        space=wire.space_to_proto(TensorSpace.HUGGING_FACE),
    )
    return wire.layout_from_proto((yield from _call("DescribeShards", request)).layout)
