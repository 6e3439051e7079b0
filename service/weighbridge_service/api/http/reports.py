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

    name: str = Field(description="What sets the limit.", examples=["memory.max of control group /"])
    limit: int = Field(description="Maximum number of bytes.")
    used: int = Field(description="Bytes in use, by any process, that cannot be reclaimed.")
    available: int = Field(description="Bytes left.")


class SpaceOut(Out):
    """Capacity for images in memory, or on disk."""

    budget: int = Field(description="Maximum number of bytes; 2**62 if there is no limit, 0 if nothing is allowed.")
    in_use: int = Field(description="Bytes of images in use.")
    free: int = Field(description="Bytes of memory or files that are free for reuse.")
    available: int = Field(description="Further bytes that the machine can provide.")
    most: int = Field(description="Bytes that the machine could provide if no other process used any.")

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
    in_memory: bool = Field(description="Whether it is in memory, and not on disk.")
    use: HeldFor = Field(description="Why it is held.")
    seconds: float = Field(description="For how long it has been held.")
    readers: int = Field(description="Number of leases under which it is read or written.")
    reading_seconds: float = Field(description="Age of the oldest of these leases, in seconds.")


class WaitingImageOut(Out):
    """An image that a push waits for."""

    model: str = Field(
        description="`namespace/name`.", examples=["acme/smol"], validation_alias=AliasPath("owner", "model")
    )
    number: int = Field(description="The version.", validation_alias=AliasPath("owner", "number"))
    nbytes: int = Field(description="Its size.")
    seconds: float = Field(description="For how long the push has waited for it.")
    reason: str = Field(description="What it waits for, with the figures.")


class MemoryOut(Out):
    """Memory of the service: limits, budget, and images."""

    budget: int = Field(description="Maximum number of bytes of images in memory.")
    budget_chosen: bool = Field(
        description="Whether the operator has set it; otherwise it was derived from the limits."
    )
    process: int = Field(description="Bytes that the service reserves for itself besides images.")
    private: int = Field(description="Bytes of these that it uses now.")
    limits: list[LimitOut] = Field(
        description="Limits on the memory that the service may use, alone or with other processes."
    )
    memory: SpaceOut = Field(description="Capacity for images in memory.")
    disk: SpaceOut = Field(description="Capacity for images in the scratch folder.")
    holdings: list[HoldingOut] = Field(description="Images in use, the longest held first.")
    waiting: list[WaitingImageOut] = Field(description="Images that pushes wait for, in the order of the queue.")
    byte_budget: int = Field(description="Maximum number of bytes of weights in flight over gRPC.")
    in_flight: dict[Direction, int] = Field(description="Bytes in flight, by direction.")

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

    name: str = Field(description="What was checked.", examples=["memory budget"])
    status: CheckStatus = Field(description="Result of the check.")
    what: str = Field(description="What was found, with the figures.")
    fix: str = Field(description="What to do about it; empty if nothing needs to be done.")


class ChecksOut(Out):
    """Findings of `weighbridge doctor`."""

    checks: list[CheckOut] = Field(description="The checks, in the order in which to read them.")


class ReadinessOut(Out):
    """Readiness: new work can be sent here."""

    status: str = Field(examples=["ready"])
    checks: list[CheckOut] = Field(description="The checks; none has failed.")


class StatusOut(Out):
    """Response to a probe."""

    status: str = Field(examples=["ok"])
