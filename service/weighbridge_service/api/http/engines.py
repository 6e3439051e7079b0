"""Routes of engines that serve versions, with their bodies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from weighbridge._core.engines.step_parts import PARTS
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.parameters import Name, Namespace
from weighbridge_service.api.http.schemas import Out
from weighbridge_service.engines.known_engines import KnownEngines
from weighbridge_service.engines.pages import LARGEST_PAGE


class EngineOut(Out):
    """An engine, as its agent has reported. Times are Unix times in milliseconds, by the clock of the service."""

    engine_id: str = Field(description="Names it for the life of its agent.")
    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    kind: str = Field(description="`vllm`, `sglang`, `transformers`, or any other word.", examples=["vllm"])
    address: str = Field(description="Where it is reached; may be empty.", examples=["http://10.0.0.7:8000"])
    ref: str = Field(description="The ref that it follows; empty if it follows none.", examples=["live"])
    version: int = Field(description="The version that it serves; 0 if none of this model.", examples=[17])
    target: int = Field(description="The version that it is being taken to; 0 if none.")
    state: str = Field(
        description="`waiting`, `updating`, `serving`, `failing`, `ended`, or what a later release adds.",
        examples=["serving"],
    )
    error: str = Field(description="Why the last update failed, or what is waited for; empty if all is well.")
    host: str = Field(description="Machine of the agent.")
    pid: int = Field(description="Its process there.")
    update_version: int = Field(description="To which its last update took it; 0 if there was none.")
    update_bytes: int = Field(description="Bytes that its ranks fetched for that.")
    update_prepare_seconds: float = Field(description="Of that update, while it served.")
    update_pause_seconds: float = Field(description="Of that update, while it stood still.")
    update_lane: str = Field(description="`local` or `grpc`; empty if that is not known.")
    traceparent: str = Field(
        description="Trace of the update that is under way, or was last (W3C Trace Context); may be empty."
    )
    proved_version: int = Field(
        description="Version of the last proof that it computes with a version's bytes; 0 if there was none."
    )
    proof: str = Field(
        description="What came of that: `proved`, `proved in part` if parameters could not be compared, `failed`, `not proved` if it was due and could "
        "not be made, or what a later release adds; empty if no proof was ever asked for.",
        examples=["proved"],
    )
    proof_seconds: float = Field(description="How long that proof took.")
    proofs: int = Field(description="Proofs that its agent has made.")
    failed_proofs: int = Field(description="Those of them that have failed.")
    proof_error: str = Field(
        description="What the last proof that has failed has found, with the parameters' names; or why one that is due cannot be made."
    )
    golden_version: int = Field(
        description="Version whose golden prompts it was asked last; 0 if there were none."
    )
    golden: str = Field(
        description="What came of that: `within bound`, `above bound`, `no bound` if there is none, `not answered`, or what a later release adds; "
        "empty if it was asked none.",
        examples=["within bound"],
    )
    golden_drift: float = Field(
        description="Largest difference between the log probabilities that it gives the tokens of these prompts and those that the version has."
    )
    golden_mean_drift: float = Field(description="Mean of these differences.")
    drafter: str = Field(
        description="The version of its drafter, if that is a model of its own which it has from the service; empty without.",
        examples=["acme/smol-eagle@5"],
    )
    update_parts: dict[str, float] = Field(
        description=f"Seconds of that update's parts, by name: {', '.join(f'`{each.name}`, {each.text}' for each in PARTS)}. "
        "One that was not measured is missing.",
        examples=[{"stage": 0.2, "agree": 0.05, "pause": 0.01, "apply": 0.03, "resume": 0.01}],
    )
    identity: str = Field(description="Of its agent, in the policy; empty if there is none.")
    standing: str = Field(
        description="`current`; `behind`: it serves another version than its ref names, or none; `pinned`: it follows no ref; `unknown`: so is "
        "what its ref names; `stale`: its agent was not heard for three reports; `gone`: for twelve, or it has ended. Or what a later release adds.",
        examples=["current"],
    )
    named: int = Field(description="The version that its ref names; 0 if none, or that is not known.")
    behind: int = Field(
        description="Versions behind the one that it serves, up to the one that its ref names; 1000 for as many or more."
    )
    heard_time_ms: int = Field(description="When its agent was heard last.")
    since_ms: int = Field(description="Since when it is in its state.")
    update_time_ms: int = Field(description="When its last update ended; 0 if there was none.")
    proof_time_ms: int = Field(description="When its last proof ended; 0 if there was none.")


class EnginesOut(Out):
    """Engines whose agents have reported lately."""

    engines: list[EngineOut] = Field(description="Engines, by model, address and id.")
    next: str = Field(description="Where the next page begins; empty if there are no more.")


_PAGE = 100
After = Annotated[str, Query(description="Begin where the page before has said, in `next`.")]
Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Largest number of engines.")]


def engines_router(engines: KnownEngines) -> APIRouter:
    """The routes.

    Args:
        engines: those of the service.
    """
    router = APIRouter(tags=["engines"])

    @router.get("/v1/engines")
    def list_engines(request: Request, after: After = "", limit: Limit = _PAGE) -> EnginesOut:
        """Engines of all models that the caller may look at. Give `next` of a page as `after` to get the next one."""
        found, more = engines.page("", peer_of(request).sees, after, limit)
        return EnginesOut.model_validate({"engines": found, "next": more})

    @router.get("/v1/models/{namespace}/{name}/engines")
    def list_engines_of(
        namespace: Namespace, name: Name, request: Request, after: After = "", limit: Limit = _PAGE
    ) -> EnginesOut:
        """Engines that serve versions of a model, and how far behind their refs they are. Likewise in pages."""
        found, more = engines.page(f"{namespace}/{name}", peer_of(request).sees, after, limit)
        return EnginesOut.model_validate({"engines": found, "next": more})

    return router
