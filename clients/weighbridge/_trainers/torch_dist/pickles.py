"""Reader of untrusted pickles as data: it does not import, look up or call anything that they name.

A pickle is a program for a small stack machine. `read_pickle` is such a machine for the part of the language that
torch's checkpoint files use (protocols 2 to 5; Python's `pickletools` reads the opcodes). In it a class is only a name,
`PickledName`, and the result of its constructor is an `Instance` that contains the arguments. Python's own
``pickle.Unpickler`` with a restricted ``find_class`` would still let a file of ten bytes allocate gigabytes (a memo
index is an array index there) and hash nested tuples forever. Here the work is limited by the length of the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from typing import Any

from weighbridge.errors import DataLoss

_CONTAINERS = {
    "builtins.dict": dict,
    "collections.OrderedDict": dict,
    "builtins.list": list,
    "builtins.set": set,
}
_MADE = frozenset(_CONTAINERS.values())
_MOST_MARKS = 1000
"""Maximum depth of nested containers. Python's own pickler gives up before that."""
_LEAST_BYTES, _FREE = 3, 4000
"""Minimum number of bytes of a pickle for each unit of the values that it creates, and number of units that are free of
this rule. It exists because one byte could create a set, which occupies two hundred. A tuple, a reference or an
instance is one unit, a list two, and a dict or set four, so that a unit is about 60 bytes of memory. Torch's pickles
have six bytes or more for each unit.
"""
_VALUES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINFLOAT",
        "BINBYTES",
        "SHORT_BINBYTES",
    ]
)
"""Opcodes that are followed by a value."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_UNITS = dict.fromkeys((*_TUPLES, "TUPLE", "NEWOBJ", "REDUCE", "BINPERSID"), 1) | {
    "EMPTY_LIST": 2, "EMPTY_DICT": 4, "EMPTY_SET": 4,
}  # fmt: skip
SIZE = "torch.Size"
GETATTR = ("__builtin__.getattr", "builtins.getattr")


class PickledName:
    """Name of a class, a function or a constant in a pickle, which is not resolved."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Instance:
    """Record of a call in a pickle, which is not executed: the class or function, its arguments, and the ``state`` for
    its result.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: Any) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None

    def fields(self, *names: str) -> list[Any]:
        """Attributes of a pickled dataclass.

        Raises:
            DataLoss: the instance has no state, or its state lacks some of these names.
        """
        if type(self.state) is not dict or any(name not in self.state for name in names):
            raise DataLoss(f"a {self.kind} does not have all of the fields {', '.join(names)}")
        return [self.state[name] for name in names]


class Persistent:
    """A reference to an object outside the pickle. Torch uses it for storages."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def allow(*names: str) -> Mapping[str, PickledName]:
    """Return the names that a pickle may contain, each as ``module.name``, including those of plain containers."""
    return {name: PickledName(name) for name in (*names, *_CONTAINERS, SIZE)}


def are_sizes(values: Any) -> bool:
    """Whether this is a tuple of sizes, strides or offsets, which are small integers that are not negative."""
    return type(values) is tuple and all(type(n) is int and 0 <= n < 1 << 50 for n in values)


def read_pickle(data: bytes, allowed: Mapping[str, PickledName] | None, what: str) -> Any:
    """Return the value that a pickle describes.

    It consists of plain containers, numbers, strings, `PickledName`, `Instance` and `Persistent`.

    Args:
        data: the pickle.
        allowed: the names that it may contain; None allows all names, because none of them is looked up.
        what: name of the pickle in messages.

    Raises:
        DataLoss: the data contains other names, is cut short, or is not a pickle. No code was executed.
    """
    try:
        return _Machine(data, allowed, what).run()
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataLoss(f"{what} is not a readable pickle: {error!r}"[:300]) from error


class _Machine:
    """One run of the stack machine."""

    def __init__(self, data: bytes, allowed: Mapping[str, PickledName] | None, what: str) -> None:
        self._data = data
        self._allowed = allowed
        self._what = what

    def run(self) -> Any:
        memo: list[Any] = []
        stack: list[Any] = []
        marks: list[list[Any]] = []
        room = _FREE + len(self._data) // _LEAST_BYTES
        opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, Any]] = pickletools.genops(self._data)
        for opcode, argument, _ in opcodes:
            op = opcode.name
            room -= _UNITS.get(op, 0)
            if room < 0:
                raise DataLoss(
                    f"{self._what} creates more containers than a pickle of {len(self._data)} bytes can need"
                )
            if op in _VALUES:
                stack.append(argument)
            elif op == "MEMOIZE":
                memo.append(stack[-1])
            elif op in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif op in ("BINPUT", "LONG_BINPUT"):
                _put(memo, argument, stack[-1])
            elif op == "MARK":
                if len(marks) == _MOST_MARKS:
                    raise ValueError(f"more than {_MOST_MARKS} nested containers")
                marks.append(stack)
                stack = []
            elif op in _EMPTY:
                stack.append(_EMPTY[op]())
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op])
            elif op in _TUPLES:
                items = [stack.pop() for _ in range(_TUPLES[op])]
                stack.append(tuple(reversed(items)))
            elif op == "TUPLE":
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif op in ("SETITEMS", "APPENDS", "ADDITEMS"):
                items, stack = stack, marks.pop()
                _add(stack[-1], items)
            elif op in ("SETITEM", "APPEND"):
                items = [stack.pop() for _ in range(2 if op == "SETITEM" else 1)]
                _add(stack[-1], items[::-1])
            elif op == "NEWOBJ":
                args = stack.pop()
                stack[-1] = Instance(_name(stack[-1]), args)
            elif op == "REDUCE":
                args = stack.pop()
                made = self._called(_name(stack[-1]), args)
                if type(made) in _MADE:
                    room -= _UNITS["EMPTY_DICT"] - 1
                stack[-1] = made
            elif op == "BUILD":
                state = stack.pop()
                # An OrderedDict may have attributes. Here a dict represents it, and the attributes are not needed.
                if type(stack[-1]) is not dict:
                    _instance(stack[-1]).state = state
            elif op == "GLOBAL":
                stack.append(self._global(*argument.split(" ", 1)))
            elif op == "STACK_GLOBAL":
                name = stack.pop()
                stack[-1] = self._global(stack[-1], name)
            elif op == "BINPERSID":
                stack[-1] = Persistent(stack[-1])
            elif op == "POP":
                stack.pop()
            elif op == "STOP":
                if len(stack) != 1 or marks:
                    raise ValueError("it does not end with exactly one value")
                return stack[0]
            elif op not in ("PROTO", "FRAME"):
                raise ValueError(f"opcode {op}")
        raise ValueError("it does not end")

    def _called(self, name: str, args: Any) -> Any:
        if name in GETATTR:  # older protocols name a class inside another class in this way
            owner, attribute = _tuple(args)
            return self._global(_name(owner), attribute)
        return _reduce(name, args)

    def _global(self, module: Any, name: Any) -> PickledName:
        if type(module) is not str or type(name) is not str:
            raise TypeError("the name of a class is not a string")
        full = f"{module}.{name}"
        found = PickledName(full) if self._allowed is None else self._allowed.get(full)
        if found is None:
            full = full.encode("ascii", "backslashreplace").decode()[:200]
            raise DataLoss(
                f"{self._what} names {full}, which is not part of a checkpoint; no code was executed",
                fix="do not load this file with torch or Megatron: they would execute what it names",
            )
        return found


def _put(memo: list[Any], index: int, value: Any) -> None:
    """Put a value at its memo index. All writers of pickles use consecutive indexes."""
    if index == len(memo):
        memo.append(value)
    else:
        memo[index] = value


def _name(value: Any) -> str:
    if type(value) is not PickledName:
        raise TypeError("a value is called that is not a class")
    return value.name


def _instance(value: Any) -> Instance:
    if type(value) is not Instance:
        raise TypeError("a state is set on a value that has none")
    return value


def _add(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is set:
        target.update(map(_key, items))
    elif type(target) is dict and len(items) % 2 == 0:
        for index in range(0, len(items), 2):
            target[_key(items[index])] = items[index + 1]
    else:
        raise TypeError("items are added to a value that does not accept them")


def _key(key: Any) -> Any:
    """Refuse keys whose hashing or lookup would take long: tuples that nest the same tuple many times, and integers
    with the same hash.
    """
    kind = type(key)
    # An Instance is equal only to itself, so readers of a mapping with such keys check for duplicates themselves.
    if kind is str or kind is Instance or kind is PickledName or _is_small(key):
        return key
    if kind is tuple and all(type(part) is str or _is_small(part) for part in key):
        return key
    raise TypeError(f"a key is a {kind.__name__}")


def _is_small(key: Any) -> bool:
    return type(key) is int and -(1 << 50) < key < 1 << 50


def _reduce(name: str, args: Any) -> Any:
    if type(args) is not tuple:
        raise TypeError("arguments are not a tuple")
    if name == SIZE:
        (extents,) = args
        return tuple(extents) if type(extents) is list else _tuple(extents)
    container = _CONTAINERS.get(name)
    if container is None:
        return Instance(name, args)
    if args and args != ([],):
        raise TypeError(f"a {name} is created with arguments")
    return container()


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise TypeError("extents are not a tuple")
    return value
