"""Response bodies of reports on the service itself: usage, memory, checks, probes."""

from __future__ import annotations

from pydantic import AliasPath, Field

from weighbridge._core.checks import CheckStatus
from weighbridge_service.admission.byte_budget import Direction, InFlight
from weighbridge_service.api.http.derived.schemas import Out
from weighbridge_service.runtime.memory_plan import MemoryReport
from weighbridge_storage.memory.image_books import HeldFor
from weighbridge_storage.memory.image_decisions import Space


class LimitOut(Out):
    """A limit on memory."""

    name: str = Field(description="What sets it.", examples=["memory.max of control group /"])
    limit: int = Field(description="Most bytes.")
    used: int = Field(description="Bytes in use that cannot be taken back, by whomever.")
    available: int = Field(description="Bytes left.")


class SpaceOut(Out):
    """Capacity for images in memory, or on disk."""

    budget: int = Field(description="Most bytes; 2**62 stands for no such bound, 0 for none at all.")
    in_use: int = Field(description="Bytes of images in use.")
    free: int = Field(description="Bytes of memory or files that wait to be used again.")
    available: int = Field(description="Bytes that the machine can give beyond these.")
    most: int = Field(description="Bytes that the machine could give if no other process took any.")

    @classmethod
    def of(cls, space: Space) -> SpaceOut:
        """The response body for a space."""
        return cls(
            budget=space.budget,
            in_use=space.in_use,
            free=sum(space.free),
            available=space.available,
            most=space.most,
        )


class HoldingOut(Out):
    """An image in use."""

    model: str = Field(
        description="`namespace/name`.", examples=["acme/smol"], validation_alias=AliasPath("owner", "model")
    )
    number: int = Field(
        description="The version; 0 if it is kept for the model's next one.",
        validation_alias=AliasPath("owner", "number"),
    )
    nbytes: int = Field(description="Its size.")
    in_memory: bool = Field(description="Whether it lies in memory, and not on disk.")
    use: HeldFor = Field(description="Why it is held.")
    seconds: float = Field(description="For how long.")
    readers: int = Field(description="Leases of those who read or write it.")
    reading_seconds: float = Field(description="For how long the oldest of these has been there.")


class WaitingImageOut(Out):
    """An image that a push waits for."""

    model: str = Field(
        description="`namespace/name`.", examples=["acme/smol"], validation_alias=AliasPath("owner", "model")
    )
    number: int = Field(description="The version.", validation_alias=AliasPath("owner", "number"))
    nbytes: int = Field(description="Its size.")
    seconds: float = Field(description="For how long.")
    reason: str = Field(description="What it waits for, with the figures.")


class MemoryOut(Out):
    """Memory of the service: limits, budget, and images."""

    budget: int = Field(description="Most bytes of images in memory.")
    budget_chosen: bool = Field(
        description="Whether the operator has set it; otherwise it was derived from the limits."
    )
    process: int = Field(description="Bytes that the service keeps for itself besides images.")
    private: int = Field(description="Bytes of these that it has.")
    limits: list[LimitOut] = Field(description="On what the service may use, alone or with others.")
    memory: SpaceOut = Field(description="Room for images in memory.")
    disk: SpaceOut = Field(description="Room for images in the scratch folder.")
    holdings: list[HoldingOut] = Field(description="Who has which image, the longest held first.")
    waiting: list[WaitingImageOut] = Field(description="Who waits for one, the first in line first.")
    byte_budget: int = Field(description="Most bytes of weights on their way through gRPC.")
    in_flight: dict[Direction, int] = Field(description="These bytes, by the way they go.")

    @classmethod
    def of(cls, report: MemoryReport, byte_budget: int, in_flight: InFlight) -> MemoryOut:
        """The response body for a report, with the usage of the budget of bytes in flight."""
        return cls(
            budget=report.budget.nbytes,
            budget_chosen=report.budget.chosen,
            process=report.needs.process,
            private=report.reading.private,
            limits=[LimitOut.model_validate(limit) for limit in report.reading.limits],
            memory=SpaceOut.of(report.memory),
            disk=SpaceOut.of(report.disk),
            holdings=[HoldingOut.model_validate(holding) for holding in report.holdings],
            waiting=[WaitingImageOut.model_validate(waiting) for waiting in report.waiting],
            byte_budget=byte_budget,
            in_flight=dict(in_flight.nbytes),
        )


class CheckOut(Out):
    """Finding of one check."""

    name: str = Field(description="What was looked at.", examples=["memory budget"])
    status: CheckStatus = Field(description="How it stands.")
    what: str = Field(description="What was found, with the figures.")
    fix: str = Field(description="What to do about it; empty if nothing needs to be done.")


class ChecksOut(Out):
    """Findings of `weighbridge doctor`."""

    checks: list[CheckOut] = Field(description="In the order in which they are best read.")


class ReadinessOut(Out):
    """Readiness: new work can be sent here."""

    status: str = Field(examples=["ready"])
    checks: list[CheckOut] = Field(description="What was looked at; none has failed.")


class StatusOut(Out):
    """Response to a probe."""

    status: str = Field(examples=["ok"])
