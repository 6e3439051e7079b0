"""Routes of the operations in the table, which determines path, parameters, bodies and OpenAPI schemas."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter as Argument
from inspect import Signature
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, create_model

from weighbridge._core.operations.operation import LARGEST_PAGE, REQUIRED, Operation, Parameter
from weighbridge._core.operations.table import OPERATIONS
from weighbridge_service.api.bodies import PAGE, Bodies
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.derived.schemas import In, answer_of, body_of, list_of
from weighbridge_service.api.http.parameters import IN_BODY, IN_PATH, Name, Namespace


class OperationRoute:
    """Route of one operation.

    Args:
        operation: the operation.
        body: its implementation.

    Attributes:
        answer: schema of the response; None if the response has no body.
    """

    def __init__(self, operation: Operation[Any], body: Callable[..., Any]) -> None:
        self._operation = operation
        self._body = body
        self.answer: type[BaseModel] | None = None
        if operation.order:
            self.answer = list_of(operation.shown, operation.within, f"by {operation.order}")
        elif operation.shown:
            self.answer = answer_of(operation.shown)
        self._left_out = {each.name: each.default for each in operation.takes if not each.offered}
        self.__signature__ = Signature(self._arguments())

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
            status_code=None if self.answer else 204,
        )

    def __call__(self, request: Request, response: Response, **said: Any) -> BaseModel | None:
        """The response to a request, whose parameters are passed by name."""
        operation = self._operation
        if "namespace" in said:
            said["model"] = f"{said.pop('namespace')}/{said.pop('name')}"
        if "body" in said:
            said |= said.pop("body").model_dump()
        for each in operation.offers:
            if _in_path(operation, each):
                said[each.name] = said.pop(IN_PATH[each.name][0])
            elif each.is_value:
                said[each.name] = each.kind(**said[each.name].model_dump())
        if operation.pages:
            said["size"] = said.pop("limit")
        found = self._body(peer_of(request), **said, **self._left_out)
        if operation.pending and getattr(found, operation.pending):
            response.status_code = 202
        if self.answer is None:
            return None
        if operation.order:
            found = {operation.within: found}
        return self.answer.model_validate(getattr(found, operation.part) if operation.part else found)

    def _arguments(self) -> list[Argument]:
        """Parameters of the route: request and response, then parameters of the path, then of the query or body."""
        found = [_argument("request", Request), _argument("response", Response)]
        members: list[Parameter] = []
        if "{model}" in self._operation.http:
            found += [_argument("namespace", Namespace), _argument("name", Name)]
        for each in self._operation.offers:
            if _in_path(self._operation, each):
                found.append(_argument(*IN_PATH[each.name]))
            elif each.is_value:
                found.append(_argument(each.name, body_of(each.kind)))
            elif self._operation.http.startswith(("PUT", "POST")) and each.name != "model":
                members.append(each)
            elif each.name != "model":
                found.append(_queried(each))
        if members:
            found.append(_argument("body", _body_of(self._operation, members)))
        return found + _of_page(self._operation)


def _argument(name: str, kind: Any, default: Any = Argument.empty) -> Argument:
    return Argument(name, Argument.KEYWORD_ONLY, annotation=kind, default=default)


def _in_path(operation: Operation[Any], parameter: Parameter) -> bool:
    return parameter.name in IN_PATH and f"{{{IN_PATH[parameter.name][0]}}}" in operation.http


def _body_of(operation: Operation[Any], members: list[Parameter]) -> type[BaseModel]:
    """The schema of a body whose members are parameters of an operation."""
    fields: dict[str, Any] = {}
    for each in members:
        default: Any = {} if each.default is REQUIRED else {"default": each.default}
        if each.default == ():  # a factory keeps the empty default out of the schema
            default = {"default_factory": tuple}
        said = Field(**default, description=_sentence(each.text))
        fields[each.name] = IN_BODY.get(each.name, each.kind), said
    return create_model(f"{operation.rpc}In", __base__=In, __doc__=operation.text.replace("``", "`"), **fields)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _queried(parameter: Parameter) -> Argument:
    default = Argument.empty if parameter.default is REQUIRED else parameter.default
    kind: Any = parameter.kind
    return _argument(parameter.name, Annotated[kind, Query(description=_sentence(parameter.text))], default)


def _of_page(operation: Operation[Any]) -> list[Argument]:
    """Paging parameters of a list."""
    if not operation.pages:
        return []
    after = Query(description=f"Start after the {operation.within[:-1]} with this {operation.order}.")
    limit = Query(ge=1, le=LARGEST_PAGE, description=f"Maximum number of {operation.within}.")
    return [
        _argument("after", Annotated[str, after], ""),
        _argument("limit", Annotated[int, limit], PAGE),
    ]


def _markdown(operation: Operation[Any]) -> str:
    text = operation.text.replace("``", "`")
    if operation.pages:
        text += f" Give the last {operation.order} of a page as `after` to get the next one."
    return f"{text} 200 if it is done, 202 if it is pending." if operation.pending else text


def operations_routes(bodies: Bodies) -> APIRouter:
    """Routes of all operations whose route is derived, not handwritten."""
    router = APIRouter()
    for each in OPERATIONS:
        if each.http and each.tag:
            OperationRoute(each, getattr(bodies, each.name)).add_to(router)
    return router
