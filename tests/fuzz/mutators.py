"""Mutators: changes to inputs that know their structure, each a pure function of a source of chance and an input.

A change that knows the structure keeps the rest of an input valid: a parser that refuses damaged bytes at once is never
seen further in. What is no such structure any more is changed as bytes.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz.target import Mutator

INTERESTING = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_TEXTS = (
    "", ".", "..", "../../x", "/etc/passwd", "a\0b", "a\nb", "\x7f", "-x", ".hidden", "x" * 300, "é" * 100, "\ud800", "9" * 30, "latest",
    "live", "weighbridge.json", "model.safetensors", "0" * 64, "F32", "BF16", "F8_E4M3", "bf16", "acme/smol", "🚂",
)  # fmt: skip
_NUMBERS = (
    -1, 0, 1, 2, 63, 64, 2**31, 10**12 - 1, 10**12, 2**50, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400, 1.5, 1e308, -0.0, float("nan"), float("inf"),
)  # fmt: skip
_MOST_REPEATS = 4096


def raw(choose: random.Random, data: bytes) -> bytes:
    """Change some bytes, take some out, put some in, or repeat a part."""
    found = bytearray(data)
    where = choose.randrange(len(found) + 1)
    length = choose.choice((1, 1, 2, 4, 8, choose.randrange(64)))
    match choose.randrange(9):
        case 0 if where < len(found):
            found[where] ^= 1 << choose.randrange(8)
        case 1:
            del found[where : where + length]
        case 2:
            found[where:where] = choose.randbytes(length)
        case 3:
            start = choose.randrange(len(found) + 1)
            found[where:where] = found[start : start + length]
        case 4:
            number = choose.choice(INTERESTING)
            order: Any = choose.choice(("little", "big"))
            size = choose.choice((1, 2, 4, 8))
            found[where : where + size] = (number % 256**size).to_bytes(size, order)
        case 5:
            del found[where:]
        case 6:
            found[where : where + 1] = (
                choose.choice((b"\0", b"\xff", b"{", b"[", b'"', b"9", b"-", b"(", b".")) * length
            )
        case 7:
            start = choose.randrange(len(found) + 1)
            part = bytes(found[start : start + length])
            found[where:where] = part * choose.choice((2, 10, 100, min(_MOST_REPEATS, 30_000 // (len(part) + 1))))
        case _:
            other = choose.randrange(len(found) + 1)
            first, last = sorted((where, other))
            found[first:last] = (
                found[first:last][::-1] if choose.random() < 0.3 else choose.randbytes(min(last - first, 16))
            )
    return bytes(found)


def one_of(*mutators: Mutator) -> Mutator:
    """Any of these."""

    def mutate(choose: random.Random, data: bytes) -> bytes:
        return choose.choice(mutators)(choose, data)

    return mutate


def json_documents(
    signed: Callable[[bytes], bytes] = bytes, texts: Sequence[str] = (), unsigned: float = 0.2
) -> Mutator:
    """Changes of JSON documents: values set, left out, doubled, renamed, exchanged, nested.

    Args:
        signed: makes a document agree with its own digest again.
        texts: texts that mean something to the parser.
        unsigned: share of the changed documents whose digest is left wrong.
    """

    def mutate(choose: random.Random, data: bytes) -> bytes:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return raw(choose, data)
        if choose.random() < 0.1:
            return raw(choose, data)
        for _ in range(choose.choice((1, 1, 1, 2, 5))):
            document = _changed(choose, document, (*_TEXTS, *texts))
        try:
            text = json.dumps(document).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return data
        return text if choose.random() < unsigned else signed(text)

    return mutate


def _changed(choose: random.Random, document: Any, texts: Sequence[str]) -> Any:
    places = list(_places(document))
    if not places or choose.random() < 0.02:
        return _value(choose, document, texts, 0)
    holder, key = choose.choice(places)
    value = holder[key]
    match choose.randrange(9):
        case 0 | 1 | 2 | 3:
            holder[key] = _value(choose, value, texts, 0)
        case 4:
            del holder[key]
        case 5 if isinstance(holder, list):
            holder.insert(choose.randrange(len(holder) + 1), value)
        case 5:
            holder[choose.choice(texts)] = value
        case 6 if isinstance(holder, dict):
            holder[choose.choice(texts)] = holder.pop(key)
        case 7:
            other, there = choose.choice(places)
            if other is not holder or there != key:
                holder[key] = _copy(other[there])
        case _:
            for _ in range(choose.choice((1, 5, 200))):
                value = [value] if choose.random() < 0.5 else {choose.choice(texts): value}
            holder[key] = value
    return document


def _copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (ValueError, RecursionError):
        return None


def _value(choose: random.Random, there: Any, texts: Sequence[str], depth: int) -> Any:
    kind = choose.randrange(6)
    if kind < 2 and type(there) is int:
        return there + choose.choice((-1, 1, -there, there, 10, 2**32))
    if kind < 2 and isinstance(there, list) and there:
        return [*there, choose.choice(there)] if choose.random() < 0.5 else there * choose.choice((2, 9))
    if kind < 2 and isinstance(there, str) and there:
        return there[: choose.randrange(len(there))] + choose.choice(("", *texts))
    if kind == 2 or (kind == 3 and type(there) is not str):
        return choose.choice(_NUMBERS)
    if kind in (3, 4):
        return choose.choice(texts)
    if depth < 3 and choose.random() < 0.3:
        return {choose.choice(texts): _value(choose, None, texts, depth + 1) for _ in range(choose.randrange(4))}
    return choose.choice((None, True, False, [], {}, [None], {"": None}, [[]], [[], {}], [0] * 300))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a JSON value: what holds it, and the key there."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, item in items:
            yield holder, key
            waiting.append(item)


def pickles(choose: random.Random, data: bytes) -> bytes:
    """Change the opcodes of a pickle: leave out, double, exchange, put in, or change arguments."""
    ops = list(_opcodes(data))
    if len(ops) < 2 or choose.random() < 0.2:
        return raw(choose, data)
    for _ in range(choose.choice((1, 1, 2, 6))):
        where = choose.randrange(len(ops))
        match choose.randrange(6):
            case 0:
                del ops[where : where + choose.choice((1, 1, 3))]
            case 1:
                ops[where:where] = ops[where : where + choose.choice((1, 2, 8))] * choose.choice((1, 1, 2, 50))
            case 2:
                other = choose.randrange(len(ops))
                ops[where : where + 1], ops[other : other + 1] = (
                    ops[other : other + 1],
                    ops[where : where + 1],
                )
            case 3:
                ops.insert(where, choose.choice(_OPCODES) * choose.choice((1, 1, 1, 3, 500)))
            case 4 if where < len(ops) and len(ops[where]) > 1:
                ops[where] = ops[where][:1] + raw(choose, ops[where][1:])
            case _:
                ops.insert(where, choose.choice(_ARGUMENTS))
        ops = ops or [b"."]
    return b"".join(ops)


_OPCODES = tuple(bytes([ord(each.code)]) for each in pickletools.opcodes)
_ARGUMENTS = (
    b"K\0", b"K\1", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"\x8a\xff" + b"\x7f" * 255, b"h\0", b"j\xff\xff\xff\x7f",
    b"j\0\0\0\0", b"r\xff\xff\xff\x7f", b"\x8c\0", b"\x8c\x05torch", b"X\xff\xff\xff\x7f", b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nSize\n",
    b"\x8c\x05torch\x8c\x04Size\x93", b"G" + struct.pack(">d", float("nan")), b"C\x03abc", b"(t", b"()R", b"]\x94h\0a", b"}\x94h\0h\0s", b"\x8f(h\0\x90",
)  # fmt: skip


def _opcodes(data: bytes) -> Iterator[bytes]:
    position = 0
    try:
        for _, _, start in pickletools.genops(io.BytesIO(data)):
            assert start is not None
            if start > position:
                yield data[position:start]
            position = start
    except Exception:  # what is no pickle any more ends here
        pass
    yield data[position:]


def frames(data: bytes) -> list[bytes]:
    """The parts of an input that consists of several, each behind its length, as four bytes; what is left over is one
    more.
    """
    found = []
    position = 0
    while position + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, position)
        found.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    if position < len(data):
        found.append(data[position:])
    return found


def framed(parts: Sequence[bytes]) -> bytes:
    """An input of several parts; see `frames`."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def of_frames(mutate: Callable[[random.Random, list[bytes]], None]) -> Mutator:
    """Changes of inputs of several parts.

    Args:
        mutate: changes a list of parts in place.
    """

    def changed(choose: random.Random, data: bytes) -> bytes:
        parts = frames(data)
        mutate(choose, parts)
        return framed(parts)

    return changed


def texts(*words: str, most: int = 8) -> Mutator:
    """Changes of texts: words of a grammar put in, left out and exchanged.

    Args:
        words: words of the grammar.
        most: times that a word is repeated.
    """

    def mutate(choose: random.Random, data: bytes) -> bytes:
        if choose.random() < 0.2:
            return raw(choose, data)
        where, end = sorted(choose.randrange(len(data) + 1) for _ in range(2))
        if choose.random() < 0.5:
            end = where
        word = choose.choice((*words, *_TEXTS)) * choose.choice((1, 1, 1, 1, most))
        return data[:where] + word.encode("utf-8", "surrogatepass") + data[end:]

    return mutate


def headers(choose: random.Random, data: bytes) -> bytes:
    """Change the JSON header of a safetensors file, and often its announced length and its data with it."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8 or choose.random() < 0.1:
        return raw(choose, data)
    header = _HEADERS(choose, data[8 : 8 + length])
    rest = data[8 + length :]
    if choose.random() < 0.1:
        rest = rest[: choose.randrange(len(rest) + 1)]
    announced = len(header) + (choose.choice((-1, 1, 2**40)) if choose.random() < 0.05 else 0)
    return max(announced, 0).to_bytes(8, "little") + header + rest


_HEADERS = json_documents(texts=("data_offsets", "dtype", "shape", "__metadata__", "weight_map", "U8", "I64", "F4"))
