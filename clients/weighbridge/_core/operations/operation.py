"""Operation of the control API, as data.

gRPC handlers, HTTP routes, the methods of both clients, the table of access and the names of metrics are derived from
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar, get_type_hints

from weighbridge._core.operations.verbs import Verb

Answer = TypeVar("Answer")

CALL_SECONDS = 60.0
"""Deadline of a call to which the service responds immediately."""
LONG_SECONDS = 3600.0
"""Deadline of a call that reads a whole version or processes a whole model."""
LARGEST_PAGE = 1000
"""Maximum number of items in a page."""


class Required(Enum):
    """Placeholder for the default of a required parameter."""

    REQUIRED = auto()


REQUIRED = Required.REQUIRED


class Of(Enum):
    """Resource for which a caller needs permission.

    Values are the names of the request's fields that identify the resource.
    """

    NOTHING = ()
    MODEL = ("model",)
    VERSION = ("model", "version")
    NUMBER = ("model", "number")
    REF = ("model", "ref")
    REFS = ("refs",)
    """Several refs, each with its model."""
    HEADER = ("header",)
    """The header, in the first of several messages, names the model."""
    REPORT = ("report",)
    """The report of an engine names its model."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of an operation.

    Attributes:
        name: name of the request's field.
        kind: type of the value: `str`, `int`, `bool`, ``tuple[str, ...]``, or a dataclass that has the fields of the
            message.
        text: description without a full stop, for the documentation of clients and of HTTP.
        default: value if the caller omits the argument.
        offered: whether derived methods and routes accept the argument.
    """

    name: str
    kind: Any
    text: str
    default: Any = REQUIRED
    offered: bool = field(default=True, kw_only=True)

    @property
    def is_value(self) -> bool:
        """Whether the argument is a dataclass."""
        return hasattr(self.kind, "__dataclass_fields__")


@dataclass(frozen=True, slots=True, eq=False)
class OperationEntry:
    """A call of the contract: its gRPC method, its HTTP route, and the permission that it needs.

    All calls may be repeated.

    Attributes:
        method: gRPC service and method, such as ``ModelService.GetGate``.
        verb: permission that the caller needs.
        of: resource for which the caller needs it.
        http: method and path, with ``{model}`` and other parameters; empty if the call does not have a route.
        route: name of the route; by default the name of the method.
        seconds: deadline.
    """

    method: str
    verb: Verb
    of: Of
    http: str = field(default="", kw_only=True)
    route: str = field(default="", kw_only=True)
    seconds: float = field(default=CALL_SECONDS, kw_only=True)

    @property
    def service(self) -> str:
        """Name of the gRPC service."""
        return self.method.partition(".")[0]

    @property
    def rpc(self) -> str:
        """Name of the gRPC method, without the name of its service."""
        return self.method.partition(".")[2]

    @property
    def name(self) -> str:
        """Name of the route and of the body: ``get_gate`` of ``GetGate``."""
        return self.route or "".join(f"_{c.lower()}" if c.isupper() else c for c in self.rpc).lstrip("_")

    @property
    def takes_long(self) -> bool:
        """Whether the call reads a whole version or processes a whole model."""
        return self.seconds > CALL_SECONDS


@dataclass(frozen=True, slots=True, eq=False)
class Operation(OperationEntry, Generic[Answer]):
    """A call for which all code except its body is derived. Its arguments are values.

    It returns one value, or a list, whole or in pages.

    Attributes:
        gives: type of the result, or of each item of a list.
        within: field of the response that contains the result; empty if the response itself has the result's fields.
        takes: arguments.
        order: attribute by which the items of a list are sorted; empty if the result is not a list.
        pages: whether a list is returned in pages. Each page begins after the `order` attribute of the last item of the
            previous page.
        part: attribute of the result that derived methods and routes return; empty if they return all of it, None if
            they return nothing.
        pending: property of the result that is true while the requested change is still pending; HTTP then responds
            with 202. Empty if the result does not have one.
        tag: group of the route in the OpenAPI document; empty if the route is written manually.
        call: name of the clients' method; empty if the method is written manually.
        text: description, for the documentation of clients and of HTTP.
        more: additional description for clients.
        raises: errors that clients document, each with its cause.
        example: lines of a doctest for clients, in which ``client`` is a client. In the asyncio client's docstrings its
            calls are awaited.
    """

    gives: type[Answer]
    within: str
    takes: tuple[Parameter, ...] = ()
    order: str = field(default="", kw_only=True)
    pages: bool = field(default=False, kw_only=True)
    part: str | None = field(default="", kw_only=True)
    pending: str = field(default="", kw_only=True)
    tag: str = field(default="", kw_only=True)
    call: str = field(default="", kw_only=True)
    text: str = field(kw_only=True)
    more: str = field(default="", kw_only=True)
    raises: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    example: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def shown(self) -> Any:
        """Type of the value that derived methods and routes return, or of each item of a list; None if they return
        nothing.
        """
        if self.part is None:
            return None
        return get_type_hints(self.gives)[self.part] if self.part else self.gives

    @property
    def offers(self) -> tuple[Parameter, ...]:
        """Arguments that derived methods and routes accept."""
        return tuple(each for each in self.takes if each.offered)

    def __post_init__(self) -> None:
        names = {each.name for each in self.takes}
        if not names.issuperset(self.of.value):
            raise TypeError(f"{self.method} is asked of {self.of.value}, and takes {sorted(names)}")
