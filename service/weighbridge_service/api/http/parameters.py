"""Parameters of paths and members of bodies that several routes share."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from pydantic import BeforeValidator, Field

from weighbridge_service.catalog.head_versions import number_in
from weighbridge_storage.documents.entries import MAX_APPROVALS, MAX_TEXT
from weighbridge_storage.documents.names import (
    MAX_VERSION,
    MODEL_NAME_PATTERN,
    MODEL_PART_PATTERN,
    REF_PATTERN,
    REQUEST_PATTERN,
)


def _text(description: str, pattern: str, *examples: str) -> Any:
    """A string in a path.

    The pattern is for documentation only; the parser of the value refuses invalid strings with a better message.
    """
    return Path(description=description, examples=list(examples) or None, json_schema_extra={"pattern": pattern})


def _digits(text: object) -> object:
    """``text`` if it is a number as `number_in` reads it: pydantic also takes 1.0 and 1_0, which are names of refs."""
    if isinstance(text, str) and number_in(text) is None:
        raise ValueError("it is not the number of a version")
    return text


Namespace = Annotated[str, _text("First half of the model's name.", MODEL_PART_PATTERN, "acme")]
Name = Annotated[
    str,
    _text("Second half of the model's name; with `:training`, its training states.", MODEL_NAME_PATTERN, "smol"),
]
VersionOrRef = Annotated[str, _text("A number or a ref.", REF_PATTERN, "latest")]
Number = Annotated[
    int, Path(ge=1, le=MAX_VERSION, description="A version's number.", examples=[17]), BeforeValidator(_digits)
]
Ref = Annotated[str, _text("Name of the ref.", REF_PATTERN, "prod")]
SignatureId = Annotated[str, _text("SHA-256 of the signature, its `id`.", "^[0-9a-f]{64}$")]
JobId = Annotated[str, _text("The `id` from the response that started the export.", "^[0-9a-f]{32}$")]
RequestId = Annotated[str, _text("The `request_id` of the request.", REQUEST_PATTERN)]
VersionField = Annotated[
    str, Field(description="A number or a ref.", max_length=128, coerce_numbers_to_str=True, examples=["17"])
]
Note = Annotated[str, Field(max_length=MAX_TEXT)]
Approvals = Annotated[int, Field(ge=0, le=MAX_APPROVALS, strict=True)]
Reasons = Annotated[tuple[str, ...], Field(max_length=16)]

IN_PATH = {
    "version": ("version", VersionOrRef),
    "number": ("version", Number),
    "ref": ("ref", Ref),
    "request_id": ("request_id", RequestId),
}
"""Names and types of path parameters, by the operation's parameter."""
IN_BODY = {"version": VersionField, "by": Note, "note": Note, "approvals": Approvals, "reasons": Reasons}
"""Types of bounded body members, by the operation's parameter."""
