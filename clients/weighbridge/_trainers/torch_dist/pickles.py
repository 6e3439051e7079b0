"""Reader of untrusted pickles, as data: nothing that they name is imported, looked up or called.

A pickle is a program for a small stack machine. `read_pickle` is such a machine, for as much of the language as
torch's checkpoint files use (protocols 2 to 5, Python's ``pickletools`` documents each opcode), in which a class is only
a name, `Named`, and what its constructor would have made is an `Instance` that holds the arguments. Python's own
``pickle.Unpickler`` with a restricted ``find_class`` would still let a file of ten bytes claim gigabytes (a memo index
is an array index there) and hash nested tuples for ever; here the work is bounded by the length of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
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
"""Containers within each other: Python's own pickler gives up before that."""
_LEAST_BYTES, _FREE = 3, 4000
"""Bytes of a pickle for each unit of what it makes, but for the first units: one byte could make a set, which takes two hundred. A tuple, a reference or an
instance is one unit, a list two, a dict or set four, which is about 60 bytes of memory for each. What torch writes has six and more."""
SIZE = "torch.Size"
GETATTR = ("__builtin__.getattr", "builtins.getattr")


class Named:
    """A class, a function or a constant that a pickle names: the name, and nothing else."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Instance:
    """What a class or function would have made of its arguments; ``state`` is what it would have been set to."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: Any) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None

    def fields(self, *names: str) -> list[Any]:
        """Attributes of a pickled dataclass.

        Raises:
            DataLoss: it has no state, or one without these.
        """
        if type(self.state) is not dict or any(name not in self.state for name in names):
            raise DataLoss(f"a {self.kind} has not all of the fields {', '.join(names)}")
        return [self.state[name] for name in names]


class Persistent:
    """A reference to something outside of the pickle; torch puts storages there."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def allow(*names: str) -> Mapping[str, Named]:
    """The names a pickle may contain, each as ``module.name``; with those of plain containers."""
    return {name: Named(name) for name in (*names, *_CONTAINERS, SIZE)}


def are_sizes(values: Any) -> bool:
    """Whether this is a tuple of sizes, strides or offsets: small integers, none of them negative."""
    return type(values) is tuple and all(type(n) is int and 0 <= n < 1 << 50 for n in values)


def read_pickle(data: bytes, allowed: Mapping[str, Named] | None, what: str) -> Any:
    """The value that a pickle describes, of plain containers, numbers, text, `Named`, `Instance` and `Persistent`.

    Args:
        data: the pickle.
        allowed: what it may name; None for anything, as none of it is looked up.
        what: what messages call it.

    Raises:
        DataLoss: it names something else, is cut short, or is no pickle. Nothing was run.
    """
    try:
        return _Machine(data, allowed, what).run()
    except StopIteration:
        raise DataLoss(
            f"{what} makes more containers than a pickle of {len(data)} bytes has a use for"
        ) from None
    except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
        raise DataLoss(f"{what} is not a pickle that can be read: {error!r}"[:300]) from error


class _Machine:
    """One run. Opcodes stand in the order of their frequency in checkpoint metadata, which is what the time goes by."""

    def __init__(self, data: bytes, allowed: Mapping[str, Named] | None, what: str) -> None:
        self._data = data
        self._allowed = allowed
        self._what = what

    def run(self) -> Any:
        data = self._data
        from_bytes = int.from_bytes
        memo: list[Any] = []
        stack: list[Any] = []
        marks: list[list[Any]] = []
        room = iter(range(_FREE + len(data) // _LEAST_BYTES))
        position = 0
        while True:
            op = data[position]
            position += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x68:  # BINGET
                stack.append(memo[data[position]])
                position += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[from_bytes(data[position : position + 4], "little")])
                position += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif op == 0x4D:  # BININT2
                stack.append(from_bytes(data[position : position + 2], "little"))
                position += 2
            elif op == 0x28:  # MARK
                if len(marks) == _MOST_MARKS:
                    raise ValueError(f"more than {_MOST_MARKS} containers within each other")
                marks.append(stack)
                stack = []
            elif op == 0x7D:  # EMPTY_DICT
                next(room), next(room), next(room), next(room)
                stack.append({})
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x81:  # NEWOBJ
                next(room)
                args = stack.pop()
                stack[-1] = Instance(_name(stack[-1]), args)
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                _set_items(stack[-1], items)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                # An OrderedDict may carry attributes; a dict stands for it here, and they are of no use.
                if type(stack[-1]) is not dict:
                    _instance(stack[-1]).state = state
            elif op == 0x85:  # TUPLE1
                next(room)
                stack[-1] = (stack[-1],)
            elif op == 0x52:  # REDUCE
                next(room)
                args = stack.pop()
                made = self._called(_name(stack[-1]), args)
                if type(made) in _MADE:
                    next(room), next(room), next(room)
                stack[-1] = made
            elif op == 0x86:  # TUPLE2
                next(room)
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x87:  # TUPLE3
                next(room)
                last = stack.pop()
                middle = stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x74:  # TUPLE
                next(room)
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
                stack.append(op == 0x88)
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = position + 1 + data[position]
                stack.append(data[position + 1 : end].decode("utf-8", "surrogatepass"))
                position = end
            elif op == 0x58:  # BINUNICODE
                end = position + 4 + from_bytes(data[position : position + 4], "little")
                stack.append(data[position + 4 : end].decode("utf-8", "surrogatepass"))
                position = end
            elif op == 0x4A:  # BININT
                stack.append(struct.unpack_from("<i", data, position)[0])
                position += 4
            elif op == 0x8A:  # LONG1
                end = position + 1 + data[position]
                stack.append(from_bytes(data[position + 1 : end], "little", signed=True))
                position = end
            elif op == 0x5D:  # EMPTY_LIST
                next(room), next(room)
                stack.append([])
            elif op == 0x61:  # APPEND
                last = stack.pop()
                _list(stack[-1]).append(last)
            elif op == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                _list(stack[-1]).extend(items)
            elif op == 0x73:  # SETITEM
                last = stack.pop()
                key = stack.pop()
                _set_items(stack[-1], [key, last])
            elif op == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                stack[-1] = self._global(stack[-1], name)
            elif op == 0x63:  # GLOBAL
                middle_end = data.index(b"\n", position)
                end = data.index(b"\n", middle_end + 1)
                module, name = data[position:middle_end].decode(), data[middle_end + 1 : end].decode()
                stack.append(self._global(module, name))
                position = end + 1
            elif op == 0x71:  # BINPUT
                _put(memo, data[position], stack[-1])
                position += 1
            elif op == 0x72:  # LONG_BINPUT
                _put(memo, from_bytes(data[position : position + 4], "little"), stack[-1])
                position += 4
            elif op == 0x95:  # FRAME: says how much to read ahead; all has been read
                position += 8
            elif op == 0x80:  # PROTO
                if data[position] not in (2, 3, 4, 5):
                    raise ValueError(f"protocol {data[position]}")
                position += 1
            elif op == 0x51:  # BINPERSID
                next(room)
                stack[-1] = Persistent(stack[-1])
            elif op == 0x47:  # BINFLOAT
                stack.append(struct.unpack_from(">d", data, position)[0])
                position += 8
            elif op == 0x43:  # SHORT_BINBYTES
                end = position + 1 + data[position]
                stack.append(data[position + 1 : end])
                position = end
            elif op == 0x42:  # BINBYTES
                end = position + 4 + from_bytes(data[position : position + 4], "little")
                stack.append(data[position + 4 : end])
                position = end
            elif op == 0x8F:  # EMPTY_SET
                next(room), next(room), next(room), next(room)
                stack.append(set())
            elif op == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                _set(stack[-1]).update(map(_key, items))
            elif op == 0x30:  # POP
                stack.pop()
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise ValueError("it ends with more or less than one value")
                return stack[0]
            else:
                raise ValueError(f"opcode {op:#04x} at {position - 1}")

    def _called(self, name: str, args: Any) -> Any:
        if name in GETATTR:  # how older protocols name a class inside of another one
            owner, attribute = _tuple(args)
            return self._global(_name(owner), attribute)
        return _reduce(name, args)

    def _global(self, module: Any, name: Any) -> Named:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a class whose name is not text")
        full = f"{module}.{name}"
        found = Named(full) if self._allowed is None else self._allowed.get(full)
        if found is None:
            full = full.encode("ascii", "backslashreplace").decode()[:200]
            raise DataLoss(
                f"{self._what} names {full}, which is not part of a checkpoint; nothing of it was run",
                fix="do not load this file with torch or Megatron: they would run what it names",
            )
        return found


def _put(memo: list[Any], index: int, value: Any) -> None:
    """Put a value where protocol 2 says; whatever writes pickles counts these indexes up."""
    if index == len(memo):
        memo.append(value)
    else:
        memo[index] = value


def _name(value: Any) -> str:
    if type(value) is not Named:
        raise TypeError("something is called that is not a class")
    return value.name


def _instance(value: Any) -> Instance:
    if type(value) is not Instance:
        raise TypeError("a state is set on something that has none")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("something is appended to what is not a list")
    return value


def _set(value: Any) -> set[Any]:
    if type(value) is not set:
        raise TypeError("something is added to what is not a set")
    return value


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items are set on what is not a dict")
    for index in range(0, len(items), 2):
        target[_key(items[index])] = items[index + 1]


def _key(key: Any) -> Any:
    """Refuse what would take long to hash or find: tuples of tuples that are all one tuple, integers with one hash."""
    kind = type(key)
    # An Instance is equal to itself only: whoever reads a mapping with such keys looks for repeated ones.
    if kind is str or kind is Instance or kind is Named or _is_small(key):
        return key
    if kind is tuple and all(type(part) is str or _is_small(part) for part in key):
        return key
    raise TypeError(f"a key that is a {kind.__name__}")


def _is_small(key: Any) -> bool:
    return type(key) is int and -(1 << 50) < key < 1 << 50


def _reduce(name: str, args: Any) -> Any:
    if type(args) is not tuple:
        raise TypeError("arguments that are not a tuple")
    if name == SIZE:
        (extents,) = args
        return tuple(_list(extents) if type(extents) is list else _tuple(extents))
    container = _CONTAINERS.get(name)
    if container is None:
        return Instance(name, args)
    if args and args != ([],):
        raise TypeError(f"a {name} made of something")
    return container()


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise TypeError("extents that are not a tuple")
    return value
