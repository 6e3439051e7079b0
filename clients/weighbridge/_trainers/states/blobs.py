"""Blob of a rank: plain values as ``torch.save`` writes them, such that ``torch.load(weights_only=True)`` reads them again.

Whoever reads a blob runs no code of whoever wrote it: what would need that is refused when it is written.
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

_PLAIN = "numbers, texts, bytes, None, plain tensors, and lists, tuples, sets and dicts of these"
_TORCHS_OWN = ("builtins", "collections", "torch", "torch._utils")
"""Modules of which torch allows what it allows, whoever has allowed it as well."""
_FIX = (
    f"give {_PLAIN}; of a numpy array torch.from_numpy(array) or array.tolist(), of an object with a state_dict() the object itself, "
    "of a DTensor its to_local() or full_tensor()"
)


def encode(values: Mapping[str, Any]) -> torch.Tensor:
    """The blob of plain values: a uint8 tensor of one axis in host memory.

    Tensors are written from host memory, without what else lies in their storage, and without being shared.

    Raises:
        InvalidArgument: something in them could not be loaded without running code; names the entry.
    """
    import torch

    prepared = {name: _prepared(value, name) for name, value in values.items()}
    if not _loads(_without_data(prepared)):
        found = (_refused(value, name) for name, value in prepared.items())
        refused = next(filter(None, found), "all of it together")
        raise InvalidArgument(f"{refused}, which torch.load(weights_only=True) refuses", fix=_FIX)
    written = io.BytesIO()
    torch.save(prepared, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def is_plain(value: Any) -> bool:
    """Whether `encode` takes a value."""
    try:
        return _loads(_without_data(_prepared(value, "")))
    except InvalidArgument:
        return False


def decode(blob: torch.Tensor, name: str) -> dict[str, Any]:
    """The values of a blob; tensors in host memory.

    Args:
        blob: a uint8 tensor of one axis in host memory.
        name: of the blob, for errors.

    Raises:
        DataLoss: it is none.
    """
    return by_name(load(blob.numpy(), name), name)


def by_name(value: Any, name: str) -> dict[str, Any]:
    """Loaded values, which are to be a dict by texts.

    Args:
        value: what was loaded; None for what is missing.
        name: of it, for errors.

    Raises:
        DataLoss: it is none.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DataLoss(f"{name} holds a {type(value).__name__}, and no values by name")
    return value


def load(content: Any, name: str, allowed: Sequence[Any] = ()) -> Any:
    """What ``torch.save`` has written, loaded without running code; tensors in host memory.

    Args:
        content: its bytes.
        name: of it, for errors.
        allowed: types that may be in it besides those that torch knows to be harmless.

    Raises:
        DataLoss: it is none, or has other types in it.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # torch says by many what is wrong with a file
        raise DataLoss(f"{name} is nothing that torch.load(weights_only=True) reads") from error


def _prepared(value: Any, path: str) -> Any:
    """A value with its tensors in host memory, each with a storage of its own size."""
    import torch

    if type(value) in (torch.Tensor, torch.nn.Parameter):
        host = value.detach().cpu()
        return host.clone() if host.untyped_storage().nbytes() > host.nbytes else host
    if isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{path} is a {type(value).__name__}, which is no plain tensor", fix=_FIX)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _prepared(child, _below(path, key))) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(_prepared(child, f"{path}[{index}]") for index, child in enumerate(value))
    return value


def _refused(value: Any, path: str) -> str | None:
    """Which entry of prepared values cannot be loaded, and of what type it is; None if all can."""
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
    except Exception:  # pickling runs the values' own code
        return False
    # a process that loads it need not have allowed what this one has
    return not any(map(written.getvalue().__contains__, _allowed_here()))


def _allowed_here() -> Iterator[bytes]:
    """How pickles name what this process has allowed to be loaded besides what torch allows."""
    import torch

    for allowed in torch.serialization.get_safe_globals():
        name = allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
        module, _, name = name.rpartition(".")
        if module not in _TORCHS_OWN:
            yield f"c{module}\n{name}\n".encode()


def _without_data(value: Any) -> Any:
    """Prepared values with empty tensors in the place of theirs: whether they load does not depend on elements."""
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
