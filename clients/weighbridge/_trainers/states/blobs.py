"""Blob of a rank: plain values as ``torch.save`` writes them, which ``torch.load(weights_only=True)`` can read.

Reading a blob does not execute code of its writer. The writer refuses values that could only be loaded by executing
code.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weighbridge.errors import DataLoss, InvalidArgument

if TYPE_CHECKING:
    import torch

_PLAIN = "numbers, strings, bytes, None, plain tensors, and lists, tuples, sets and dicts of these"
_TORCHS_OWN = ("builtins", "collections", "torch", "torch._utils")
"""Modules whose allowed types torch chooses itself, even if this process has allowed them too."""
_FIX = (
    f"give {_PLAIN}; for a numpy array torch.from_numpy(array) or array.tolist(), for an "
    "object with a state_dict() the object itself, "
    "for a DTensor its to_local() or full_tensor()"
)


def encode(values: Mapping[str, Any]) -> torch.Tensor:
    """Encode plain values as a blob, a uint8 tensor of one axis in host memory.

    Tensors are written from host memory, each with a storage that contains exactly its own elements.

    Raises:
        InvalidArgument: a value could not be loaded without executing code (names the entry).
    """
    import torch

    prepared = {name: _prepared(value, name) for name, value in values.items()}
    if not _loads(_without_data(prepared)):
        found = (_refused(value, name) for name, value in prepared.items())
        refused = next(filter(None, found), "the combination of the values")
        raise InvalidArgument(f"{refused}, which torch.load(weights_only=True) refuses", fix=_FIX)
    written = io.BytesIO()
    torch.save(prepared, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def is_plain(value: Any) -> bool:
    """Whether `encode` accepts a value."""
    try:
        return _loads(_without_data(_prepared(value, "")))
    except InvalidArgument:
        return False


def decode(blob: torch.Tensor, name: str) -> dict[str, Any]:
    """Return the values of a blob, with tensors in host memory.

    Args:
        blob: a uint8 tensor of one axis in host memory.
        name: name of the blob, for errors.

    Raises:
        DataLoss: the tensor is not a blob.
    """
    return by_name(load(blob.numpy(), name), name)


def by_name(value: Any, name: str) -> dict[str, Any]:
    """Return the loaded value, after a check that it is a dict with strings as keys.

    Args:
        value: the loaded value; None if it is missing.
        name: name of the value, for errors.

    Raises:
        DataLoss: the value is not such a dict.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DataLoss(f"{name} contains a {type(value).__name__}, not values by name")
    return value


def load(content: Any, name: str, allowed: Sequence[Any] = ()) -> Any:
    """Load bytes that ``torch.save`` has written, without executing code. Tensors are in host memory.

    Args:
        content: the bytes.
        name: name of the bytes, for errors.
        allowed: types that are allowed in addition to those that torch allows.

    Raises:
        DataLoss: the bytes are not such a file, or contain other types.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many types of errors for a damaged file
        raise DataLoss(f"{name} is not a file that torch.load(weights_only=True) can read") from error


def _prepared(value: Any, path: str) -> Any:
    """Return a value with its tensors in host memory, each with a storage of its own size."""
    import torch

    if type(value) in (torch.Tensor, torch.nn.Parameter):
        host = value.detach().cpu()
        return host.clone() if host.untyped_storage().nbytes() > host.nbytes else host
    if isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{path} is a {type(value).__name__}, which is not a plain tensor", fix=_FIX)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _prepared(child, _below(path, key))) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(_prepared(child, f"{path}[{index}]") for index, child in enumerate(value))
    return value


def _refused(value: Any, path: str) -> str | None:
    """Return a text that names an entry of prepared values that cannot be loaded, and its type; None if all can be
    loaded.
    """
    if _loads(_without_data(value)):
        return None
    for below, child in _children(value, path):
        found = _refused(child, below)
        if found is not None:
            return found
    return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"


def _loads(value: Any) -> bool:
    import torch

    written = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(value, written)
            written.seek(0)
            torch.load(written, weights_only=True)
    except Exception:  # pickling executes the values' own code
        return False
    # the process that loads the blob may not allow the types that this process allows
    return not any(map(written.getvalue().__contains__, _allowed_here()))


def _allowed_here() -> Iterator[bytes]:
    """Opcodes by which pickles name the types that this process has allowed in addition to torch's own."""
    import torch

    for allowed in torch.serialization.get_safe_globals():
        name = allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
        module, _, name = name.rpartition(".")
        if module not in _TORCHS_OWN:
            yield f"c{module}\n{name}\n".encode()


def _without_data(value: Any) -> Any:
    """Return prepared values with empty tensors, because the elements do not affect whether values can be loaded."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.new_empty(0)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_data(child)) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_without_data, value))
    return value


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((_below(path, key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(value))


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
