"""Schemas of dataclasses, for responses and for requests.

The description of each field is the field's docstring.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, create_model

from weighbridge._core.json_values import names_of
from weighbridge._core.metadata import Metadata

_LARGEST = 2**53
"""JavaScript represents all integers up to this one exactly."""
EXAMPLES: dict[str, Any] = {
    "model": "acme/smol",
    "number": 17,
    "model_type": "llama",
    "dtype": "BF16",
    "ref": "prod",
    "version": 17,
    "refs": {"latest": 17, "live": 18},
    "adapters": ["acme/alice"],
    "base": "acme/smol@17",
    "held": ["nonfinite"],
    "metadata": {"reward": 0.71},
}
"""Examples by the field's name."""


class Out(BaseModel):
    """Base of response bodies."""

    model_config = ConfigDict(from_attributes=True, protected_namespaces=())


class In(BaseModel):
    """Base of request bodies."""

    # an unknown member is probably a typo, so it is an error
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _whole(value: object) -> object:
    """Convert a float without a fraction to an integer, because JSON Schema treats it as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# the limits come before the validator; otherwise they would be missing in the JSON Schema
Whole = Annotated[int, Field(strict=True, ge=0, le=_LARGEST), BeforeValidator(_whole)]
_TAKEN: dict[Any, Any] = {bool: StrictBool, int: Whole}


@functools.cache
def texts_of(kind: Any) -> dict[str, str]:
    """The docstring of each field of a dataclass, by the field's name."""
    found, name = dict[str, str](), ""
    for base in kind.__bases__:
        found |= texts_of(base) if hasattr(base, "__dataclass_fields__") else {}
    body: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    for each in body.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=field)):
                name = field
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = inspect.cleandoc(text).replace("``", "`").replace("\n", " ")
                name = ""
            case _:
                name = ""
    return found


@functools.cache
def answer_of(kind: Any, *without: str) -> type[BaseModel]:
    """The response schema of a dataclass, without some fields; named after the class with the suffix ``Out``."""
    hints, texts = typing.get_type_hints(kind), texts_of(kind)
    members: dict[str, Any] = {
        name: (_answered(hints[name]), _field(name, texts[name])) for name in names_of(kind) if name not in without
    }
    for name in kind.ALSO_IN_JSON:
        read = getattr(kind, name).fget
        members[name] = _answered(typing.get_type_hints(read)["return"]), Field(description=_summary(read))
    return create_model(f"{kind.__name__}Out", __base__=Out, __doc__=_summary(kind), **members)


@functools.cache
def list_of(kind: Any, name: str, order: str) -> type[BaseModel]:
    """The response schema of a list, or of a page of it.

    The member ``name`` contains the items; ``order`` describes their order.
    """
    text = f"{name.capitalize()}, {order}."
    members: dict[str, Any] = {name: (list[answer_of(kind)], Field(description=text))}  # type: ignore[misc]
    return create_model(f"{name.capitalize()}Out", __base__=Out, __doc__=text, **members)


@functools.cache
def body_of(kind: Any) -> type[BaseModel]:
    """The request schema of a dataclass, named after the class with the suffix ``In``.

    Omitted members get their default values.
    """
    hints, texts = typing.get_type_hints(kind), texts_of(kind)
    members: dict[str, Any] = {
        each.name: (
            _TAKEN.get(hints[each.name], hints[each.name]),
            Field(... if each.default is MISSING else each.default, description=texts[each.name]),
        )
        for each in fields(kind)
    }
    return create_model(f"{kind.__name__}In", __base__=In, __doc__=_summary(kind), **members)


def _summary(documented: object) -> str:
    """First paragraph of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("``", "`")


def _field(name: str, text: str) -> Any:
    return Field(description=text, examples=[EXAMPLES[name]] if name in EXAMPLES else None)


def _answered(hint: Any) -> Any:
    """The pydantic type for the type of a dataclass's field."""
    if isinstance(hint, UnionType):  # with None
        return _answered(typing.get_args(hint)[0]) | None
    if hasattr(hint, "__dataclass_fields__"):
        return answer_of(hint)
    if hint == Metadata:
        return dict[str, str | int | float | bool]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return list[_answered(inner[0])]  # type: ignore[misc]
    return dict.__class_getitem__(inner) if origin is Mapping else hint
