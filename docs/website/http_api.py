"""Page of the HTTP interface: what the service's own OpenAPI document says, as Markdown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

Described = Mapping[str, Any]
_METHODS = ("get", "head", "put", "post", "delete")
_INTRODUCTION = """\
# HTTP interface

What the service says of itself at `/openapi.json`, and at `/docs` as a page to try it on. How it is used: [HTTP](../http.md). What each route asks of
its caller's rights: [access](../access.md#identities-and-scopes). Errors are problem documents (RFC 9457), [`Problem`](#problem).
"""


def document() -> Described:
    """The OpenAPI document of a service over an empty store, asked as any client asks it.

    Raises:
        RuntimeError: the service does not start; it has said why on stderr.
    """
    with tempfile.TemporaryDirectory() as store:
        asked = "--grpc 127.0.0.1:0 --http 127.0.0.1:0 --local-socket off --log-level warning"
        line = [sys.executable, "-m", "weighbridge", "serve", "--store", store, *asked.split()]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as service:
            try:
                ready = re.search(r"HTTP on http://(\S+?),", service.stdout.readline() if service.stdout else "")
                if ready is None:
                    raise RuntimeError("the service whose OpenAPI document is wanted did not start")
                with closing(HTTPConnection(ready[1], timeout=60)) as web:
                    web.request("GET", "/openapi.json")
                    made: Described = json.loads(web.getresponse().read())
            finally:
                service.terminate()
    return made


def page(described: Described) -> str:
    """The page, as Markdown.

    Args:
        described: an OpenAPI document.
    """
    tagged: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method in (each for each in _METHODS if each in operations):
            operation = operations[method]
            lines = tagged.setdefault(operation.get("tags", ["others"])[0], [])
            lines += _operation(f"{method.upper()} {path}", operation)
    lines = [_INTRODUCTION]
    for tag, told in tagged.items():
        lines += ["", f"## {tag.capitalize()}", *told]
    problem = described["paths"]["/v1/models"]["get"]["responses"]["default"]["content"]["application/problem+json"][
        "schema"
    ]
    schemas = {**described["components"]["schemas"], problem["title"]: problem}
    lines += ["", "## Bodies"]
    for name, schema in sorted(schemas.items()):
        lines += _schema(name, schema)
    return "\n".join(lines) + "\n"


def _operation(name: str, operation: Described) -> Iterator[str]:
    identity = operation["operationId"]
    attributes = f"#{identity.replace('_', '-')} data-toc-label='{identity.replace('_', ' ')}'"
    yield from ("", f"### `{name}` {{ {attributes} }}", "", operation["description"])
    parameters = operation.get("parameters", ())
    if parameters:
        yield from ("", "| parameter | in | type | |", "|---|---|---|---|")
        for each in parameters:
            yield f"| `{each['name']}` | {each['in']} | {_kind(each['schema'])} | {_cell(_told(each))} |"
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield from ("", f"Body: {_body(kind, body)}.")
    for status, response in operation["responses"].items():
        if status != "default":
            told = [_body(kind, body) for kind, body in response.get("content", {}).items()]
            yield from ("", f"Answers {status}{': ' if told else ''}{', or '.join(told)}.")


def _schema(name: str, schema: Described) -> Iterator[str]:
    yield from ("", f"### {name} {{ #{name.lower()} }}", "")
    if "description" in schema:
        yield from (schema["description"], "")
    if schema.get("properties"):
        yield from ("| field | type | |", "|---|---|---|")
        for field, said in schema["properties"].items():
            needed = "required. " if field in schema.get("required", ()) and name.endswith("In") else ""
            yield f"| `{field}` | {_kind(said)} | {needed}{_cell(_told(said))} |"
    elif "enum" in schema:
        yield ", ".join(f"`{each}`" for each in schema["enum"])
    else:
        yield _kind(schema)


def _told(said: Described) -> str:
    """Description of a parameter or a field, with its default."""
    default = said.get("schema", said).get("default")
    told = said.get("description", "")
    return f"{told} Default: `{default}`." if default not in (None, "") else told


def _body(kind: str, body: Described) -> str:
    schema = body.get("schema", {})
    return f"{_kind(schema)} (`{kind}`)" if schema else f"`{kind}`"


def _kind(schema: Described) -> str:
    """A schema in a few words, with a link if it is one of the bodies."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return " or ".join(_kind(each) for each in schema[choice])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return f"{kind}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
