"""Routes of the operations in the table: path, parameters, bodies and OpenAPI schemas follow from it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter as Argument
from inspect import Signature
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from weighbridge._core.operations.operation import REQUIRED, Operation, Parameter
from weighbridge._core.operations.table import OPERATIONS
from weighbridge_service.api.bodies import LARGEST_PAGE, PAGE, Bodies
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.derived.schemas import answer_of, body_of, page_of
from weighbridge_service.api.http.parameters import Name, Namespace, Number, Ref, RequestId, VersionOrRef

_IN_PATH = {
    "version": ("version", VersionOrRef),
    "number": ("version", Number),
    "ref": ("ref", Ref),
    "request_id": ("request_id", RequestId),
}
"""Names and types of parameters of paths, by the operation's parameter."""


class OperationRoute:
    """Route of one operation.

    Args:
        operation: which one.
        body: what is done.

    Attributes:
        answer: schema of the answer.
    """

    def __init__(self, operation: Operation[Any], body: Callable[..., Any]) -> None:
        self._operation = operation
        self._body = body
        kind: Any = operation.gives
        items = operation.within
        self.answer = page_of(kind, items, operation.pages) if operation.pages else answer_of(kind)
        self.__signature__ = Signature(
            [Argument("request", Argument.KEYWORD_ONLY, annotation=Request), *self._arguments()]
        )

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        method, _, path = self._operation.http.partition(" ")
        router.add_api_route(
            path.replace("{model}", "{namespace}/{name}"),
            self,
            methods=[method],
            name=self._operation.name,
            tags=[self._operation.tag],
            description=_markdown(self._operation),
            response_model=self.answer,
        )

    def __call__(self, request: Request, **said: Any) -> BaseModel:
        """The answer to a request, whose parameters are given by name."""
        if "namespace" in said:
            said["model"] = f"{said.pop('namespace')}/{said.pop('name')}"
        for each in self._operation.takes:
            if each.name in _IN_PATH:
                said[each.name] = said.pop(_IN_PATH[each.name][0])
            elif each.is_value:
                said[each.name] = each.kind(**said[each.name].model_dump())
        if self._operation.pages:
            size = said.pop("limit")
            found = self._body(peer_of(request), **said, size=size)
            return self.answer.model_validate({self._operation.within: found})
        return self.answer.model_validate(self._body(peer_of(request), **said))

    def _arguments(self) -> list[Argument]:
        """Parameters of the path, then of the query or the body."""
        found = [
            Argument(each, Argument.KEYWORD_ONLY, annotation=kind) for each, kind in _model(self._operation)
        ]
        for each in self._operation.takes:
            if each.name in _IN_PATH:
                name, kind = _IN_PATH[each.name]
                found.append(Argument(name, Argument.KEYWORD_ONLY, annotation=kind))
            elif each.is_value:
                found.append(Argument(each.name, Argument.KEYWORD_ONLY, annotation=body_of(each.kind)))
            elif each.name != "model":
                found.append(_queried(each))
        return found + _of_page(self._operation)


def _model(operation: Operation[Any]) -> list[tuple[str, Any]]:
    return [("namespace", Namespace), ("name", Name)] if "{model}" in operation.http else []


def _queried(parameter: Parameter) -> Argument:
    text = parameter.text[0].upper() + parameter.text[1:] + "."
    default = Argument.empty if parameter.default is REQUIRED else parameter.default
    kind: Any = parameter.kind
    annotation: Any = Annotated[kind, Query(description=text)]
    return Argument(parameter.name, Argument.KEYWORD_ONLY, annotation=annotation, default=default)


def _of_page(operation: Operation[Any]) -> list[Argument]:
    """Parameters by which a list goes on."""
    if not operation.pages:
        return []
    after = Query(description=f"Begin behind the {operation.within[:-1]} of this {operation.pages}.")
    limit = Query(ge=1, le=LARGEST_PAGE, description=f"Largest number of {operation.within}.")
    return [
        Argument("after", Argument.KEYWORD_ONLY, annotation=Annotated[str, after], default=""),
        Argument("limit", Argument.KEYWORD_ONLY, annotation=Annotated[int, limit], default=PAGE),
    ]


def _markdown(operation: Operation[Any]) -> str:
    more = (
        f" Give the last {operation.pages} of a page as `after` to get the next one."
        if operation.pages
        else ""
    )
    return operation.text.replace("``", "`") + more


def operations_routes(bodies: Bodies) -> APIRouter:
    """Routes of all operations that have one which is not written by hand."""
    router = APIRouter()
    for each in OPERATIONS:
        if each.http and each.tag:
            OperationRoute(each, getattr(bodies, each.name)).add_to(router)
    return router
