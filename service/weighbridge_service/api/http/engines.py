"""Routes of engines that serve versions, with their bodies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, create_model

from weighbridge._core.engines.facts import Engine
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.derived.schemas import Out, answer_of
from weighbridge_service.api.http.parameters import Name, Namespace
from weighbridge_service.engines.known_engines import KnownEngines
from weighbridge_service.engines.pages import LARGEST_PAGE

ENGINES = create_model(
    "EnginesOut",
    __base__=Out,
    __doc__="Engines whose agents have reported recently.",
    engines=(list[answer_of(Engine)], Field(description="Engines, by model, address and id.")),  # type: ignore[misc, arg-type]
    next=(str, Field(description="Where the next page begins; empty if there are no more engines.")),
)
_PAGE = 100
After = Annotated[str, Query(description="Where the page begins: `next` of the previous page.")]
Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Maximum number of engines.")]


def engines_router(engines: KnownEngines) -> APIRouter:
    """The routes.

    Args:
        engines: the engines that the service knows.
    """
    router = APIRouter(tags=["engines"])

    @router.get("/v1/engines", response_model=ENGINES)
    def list_engines(request: Request, after: After = "", limit: Limit = _PAGE) -> BaseModel:
        """Engines of all models that the caller may see. Give `next` of a page as `after` to get the next one."""
        found, more = engines.page("", peer_of(request).sees, after, limit)
        return ENGINES.model_validate({"engines": found, "next": more})

    @router.get("/v1/models/{namespace}/{name}/engines", response_model=ENGINES)
    def list_engines_of(
        namespace: Namespace, name: Name, request: Request, after: After = "", limit: Limit = _PAGE
    ) -> BaseModel:
        """Engines that serve versions of a model, and how far behind their refs they are.

        Give `next` of a page as `after` to get the next one.
        """
        found, more = engines.page(f"{namespace}/{name}", peer_of(request).sees, after, limit)
        return ENGINES.model_validate({"engines": found, "next": more})

    return router
