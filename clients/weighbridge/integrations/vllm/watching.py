"""Observation of processing: which operations on tensors it runs, and what it changes. Does not need vLLM."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = dict[str, torch.Tensor]

_TENSORS = ("_parameters", "_buffers")
_VALUES = (bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype, torch.device, torch.Size)
_DEPTH = 2
"""Steps from a layer or its method to objects whose attributes are watched."""
_HEAP_TYPE = 1 << 9
"""Flag of CPython for classes that are created at run time."""


class Unsuitable(Exception):  # never leaves the plug-in
    """Processing that cannot run ahead; the message states why."""


class WritesInPlace(Unsuitable):
    """Processing that writes to its input tensors."""


def own_tensors(layer: torch.nn.Module) -> Tensors:
    """Parameters and buffers of one layer, without those of layers inside it."""
    both = [*layer._parameters.items(), *layer._buffers.items()]
    return {name: tensor for name, tensor in both if tensor is not None}


def lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and dtype."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 if it has none."""
    if tensor.is_meta or is_lazy(tensor) or not tensor.numel():
        return 0
    return int(tensor.untyped_storage().data_ptr())


def state(layer: torch.nn.Module, method: object) -> list[Any]:
    """State that processing could change other than by operations on tensors."""
    tensors = [(name, id(t), t.data_ptr(), lies(t)) for name, t in own_tensors(layer).items()]
    attributes = [(key, _identity(value)) for owner in (layer, method) for key, value in vars(owner).items()]
    return [tensors, attributes]


def kept_names(before: list[Any], after: list[Any], written: set[int]) -> frozenset[str]:
    """Names of tensors, in the first part of `state`, that exist before and after, and that no operation has written
    to.
    """
    return frozenset(each[0] for each in after if each in before and each[2] not in written)


class AttributesSnapshot:
    """Snapshot of the attributes of objects, and of objects within a few steps of them.

    Args:
        owners: objects.
    """

    def __init__(self, *owners: object) -> None:
        self._kept: list[object] = []
        """Values whose ids are recorded. They are kept alive, so that no other object gets the same id."""
        self.facts: dict[int, list[Any]] = {}
        todo = deque((each, 0) for each in owners)
        while todo:
            each, depth = todo.popleft()
            if id(each) in self.facts:
                continue
            attributes = _attributes_of(each)
            self._kept.append((each, list(attributes.values())))
            self.facts[id(each)] = [(key, _content(value)) for key, value in attributes.items()]
            if depth < _DEPTH:
                todo += [(value, depth + 1) for value in _flat(attributes.values()) if _is_object(value)]


def _attributes_of(owner: object) -> dict[str, Any]:
    slots = [name for kind in type(owner).__mro__ for name in _slots_of(kind)]
    return {**getattr(owner, "__dict__", {}), **{n: getattr(owner, n) for n in slots if hasattr(owner, n)}}


def _slots_of(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _is_object(value: object) -> bool:
    """Whether a value has attributes that processing might change."""
    if isinstance(value, (*_VALUES, type, torch.Tensor, FunctionType, MethodType, ModuleType, partial)):
        return False
    if _is_of_torch(type(value)):  # such as operators, which look up their overloads when called
        return False
    return hasattr(value, "__dict__") or bool(getattr(type(value), "__slots__", ()))


def _is_of_torch(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and not issubclass(kind, torch.nn.Module)


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _content(value: object) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [_identity(each) for each in value]
    if isinstance(value, dict):
        return [(_identity(key), _identity(each)) for key, each in value.items()]
    return _identity(value)


def has_attributes(value: Any) -> bool:
    """Whether the whole state of an object is in its own attributes, so that an object with the same attributes is
    equivalent.
    """
    if isinstance(value, type | torch.Tensor | FunctionType | MethodType | partial | Enum):
        return False
    kind: Any = type(value)
    return bool(_has_attributes(kind)) and hasattr(value, "__dict__")


@cache
def _has_attributes(kind: type[Any]) -> bool:
    if _is_of_torch(kind):
        return False
    classes = [each for each in kind.__mro__ if each is not object]
    return all(each.__flags__ & _HEAP_TYPE and not vars(each).get("__slots__") for each in classes)


def same_state(old: Sequence[object], new: Sequence[object], made: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """An attribute in which objects differ from their copies; empty if none.

    The first object's own tensors are not compared.

    Args:
        old: objects.
        new: one copy of each.
        made: tensors of the old objects, and their counterparts in the new ones.
    """
    comparison = _Comparison(made)
    comparison.assumed |= {(id(a), id(b)) for a, b in zip(old, new, strict=True)}
    for a, b in zip(old, new, strict=True):
        left_out = _TENSORS if a is old[0] else ()
        mine, others = ({k: v for k, v in vars(each).items() if k not in left_out} for each in (a, b))
        if mine.keys() != others.keys():
            return f"{type(a).__name__}.{min(mine.keys() ^ others.keys())}"
        for key, value in mine.items():
            if not comparison.same(value, others[key]):
                return f"{type(a).__name__}.{key}"
    return ""


class _Comparison:
    """Comparison of objects by their attributes, recursively down to equal values.

    Attributes:
        assumed: ids of pairs that count as equal: those being compared, and known ones.
    """

    def __init__(self, made: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.assumed: set[tuple[int, int]] = set()
        self._made = {storage_of(new): (old, new) for old, new in made if new.numel()}

    def same(self, old: Any, new: Any) -> bool:
        """Whether both objects compute the same results."""
        if old is new or (id(old), id(new)) in self.assumed:
            return True
        if type(old) is not type(new):
            return False
        if isinstance(old, _VALUES):
            return bool(old == new)
        if isinstance(old, torch.Tensor):
            return self._same_tensor(old, new)
        self.assumed.add((id(old), id(new)))
        mine, others = _parts(old), _parts(new)
        if mine is None or others is None:
            return isinstance(old, set | frozenset) and old == new
        return len(mine) == len(others) and all(map(self.same, mine, others))

    def _same_tensor(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        if lies(old) != lies(new):
            return False
        if not old.numel():
            return True
        pair = self._made.get(storage_of(new))
        if pair is None or storage_of(old) != storage_of(pair[0]):
            return False
        return old.data_ptr() - pair[0].data_ptr() == new.data_ptr() - pair[1].data_ptr()


def _parts(value: Any) -> list[Any] | None:
    """Parts of a value; None if not known."""
    match value:
        case list() | tuple():
            return list(value)
        case dict():
            return [*value.keys(), *value.values()]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
        case MethodType():
            return [value.__func__, value.__self__]
        case partial():
            return [value.func, value.args, value.keywords]
        case _ if has_attributes(value):
            found = vars(value)
            return [*found.keys(), *found.values()]
    return None


def _identity(value: object) -> Any:
    """The part of a value that processing does not change if the value does not depend on weights."""
    if isinstance(value, FunctionType) and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return value.__code__  # processing may define it again each time
    return value if isinstance(value, bool | int | str | None) else id(value)


def _copies_to_itself(func: Any, args: Any) -> bool:
    """Whether an operation copies a tensor onto itself, as vLLM does with experts whose kernel uses them as loaded."""
    if func is not torch.ops.aten.copy_.default:
        return False
    target, source = args[:2]
    if not isinstance(source, torch.Tensor):  # a number: vLLM sets scales of a KV cache this way
        return False
    return bool(target.data_ptr() == source.data_ptr()) and lies(target) == lies(source)


class AnyOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Observes executed operations on tensors.

    ``seen`` names the first one that reads or writes more than a tensor's own memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.seen = ""
        self.written: set[int] = set()
        """Addresses of tensors that operations have written to; copies of a tensor onto itself do not count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (getattr(func, "is_view", False) or _copies_to_itself(func, args)):  # a view reads no element
            self.seen = self.seen or str(func)
            operands = _operands(func, args, kwargs or {})
            self.written |= {tensor.data_ptr() for tensor, written in operands if written}
        return func(*args, **(kwargs or {}))


class OperationsGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Refuses, before they run, operations of processing that would access tensors that the engine computes with.

    Args:
        given: storages of the input tensors of processing.
        live: storages of the engine's tensors, which may be neither read nor written.
        constant: storages of the engine's tensors that may be read.
    """

    def __init__(self, given: set[int], live: set[int], constant: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._given = given - {0}
        self._live = live - {0} - constant
        self._constant = constant - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in getattr(func, "namespace", ""):
            raise Unsuitable("it communicates with other ranks")
        for tensor, written in _operands(func, args, kwargs):
            storage = storage_of(tensor)
            if storage in self._live and not getattr(func, "is_view", False):
                raise Unsuitable(f"{func} {'writes' if written else 'reads'} a tensor that the engine computes with")
            if written and storage in self._constant:
                raise Unsuitable(f"{func} writes a tensor that the engine computes with")
            if written and storage in self._given:
                raise WritesInPlace(f"{func} writes the weights as they were loaded")
        return func(*args, **kwargs)


@contextmanager
def silent() -> Iterator[None]:
    """Block in which this thread refuses vLLM's communication calls between ranks, because they could interleave with
    the engine's own. Queries of ranks and groups are allowed. torch's communication calls are operations, which
    `OperationsGuard` handles.

    Raises:
        Unsuitable: such a call was made.
    """

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and frame.f_globals.get("__name__", "").startswith("vllm.distributed")
            and code.co_flags & CO_OPTIMIZED  # not the body of a module or of a class
            and not _asks(code.co_name)
        ):
            raise Unsuitable(f"it communicates with other ranks ({code.co_name})")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def _asks(function: str) -> bool:
    return function.lstrip("_").startswith(("get_", "is_", "<")) or function.endswith(("rank", "size", "group"))


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Input tensors of an operation, and whether it writes to them."""
    schema = getattr(func, "_schema", None)
    declared = [] if schema is None else schema.arguments
    writes = {each.name: each.alias_info is not None and each.alias_info.is_write for each in declared}
    names = [each.name for each in declared if not each.kwarg_only]
    names += [""] * (len(args) - len(names))
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor):
                yield each, writes.get(name, False)
