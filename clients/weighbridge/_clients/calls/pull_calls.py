"""Plan of a pull: its version and its slices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weighbridge._clients.calls.known_layouts import KnownLayout, KnownLayouts, same_as
from weighbridge._clients.calls.steps import Steps, UnaryCall, Work
from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._core.slices import Boxes, FullTensors, LayoutRequest
from weighbridge._core.text.counts import counted
from weighbridge._core.text.sizes import readable_size
from weighbridge._transport import wire
from weighbridge._transport.request_parts import encoded_parts
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import weight_service_pb2 as pb

if TYPE_CHECKING:
    import torch

__all__ = ["PullPlan"]


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Version and slices that a pull transfers.

    Attributes:
        version: the version. It does not change if the ref moves.
        layout: the slices in the order in which the pull yields them.
        request: the request of the caller.
        dtype: dtype to which floating-point tensors are cast; empty if they are not.
    """

    version: Version
    layout: Layout = field(repr=False)
    request: LayoutRequest
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return self.layout.nbytes


def described(plan: PullPlan) -> str:
    """Return the size of a pull as text."""
    cast = f" in {plan.dtype}" if plan.dtype else ""
    return f"{counted(len(plan.layout.placements), 'slice')}{cast}, {readable_size(plan.nbytes)}"


def plan_boxes(plan: PullPlan, boxes: Boxes) -> Steps[PullPlan]:
    """Plan a pull of boxes from the version of another plan, with its dtype."""
    return plan_pull(KnownLayouts(), plan.version.model, plan.version.number, boxes, plan.dtype)


def plan_pull(
    layouts: KnownLayouts,
    model: str,
    version: str | int | None,
    layout: LayoutRequest | None = None,
    dtype: str | torch.dtype | None = None,
) -> Steps[PullPlan]:
    """Ask the service for the plan of a pull. The service sends a layout of many slices only once.

    Later plans refer to it by its digest.
    """
    asked = layout or FullTensors()
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.PlanPullRequest(
        model=meant.model, version=meant.version, dtype=dtypes.parse(dtype).short if dtype else ""
    )

    def encode() -> tuple[Hashable, KnownLayout | None, tuple[bytes, ...]]:
        try:
            request.layout.CopyFrom(wire.request_to_proto(asked))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"what is to be pulled is malformed: {error}",
                fix="ask for FullTensors, TensorParallel or Boxes",
            ) from error
        what = (meant.model, request.layout.SerializeToString(), request.dtype)
        known = layouts.find(what)
        if known is not None:
            request.known_layout = known.digest
        return what, known, encoded_parts(request)

    what, known, encoded = yield Work(encode)
    raw = yield UnaryCall("/weighbridge.v1.WeightService/PlanPull", encoded)

    def plan() -> PullPlan:
        found = pb.PlanPullResponse.FromString(raw)
        if found.HasField("layout"):
            slices = wire.layout_from_proto(found.layout)
            layouts.keep(what, found.layout_digest, slices)
        else:
            slices = same_as(known, found.layout_digest)
        return PullPlan(wire.version_from_proto(found.version), slices, asked, request.dtype)

    planned: PullPlan = yield Work(plan)
    return planned
