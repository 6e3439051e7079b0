"""Element types, with the names that safetensors, torch and users give them.

The canonical name is the one in safetensors headers (``BF16``), because every file that the service stores contains it.
The names come from the safetensors format description and from ``torch.dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["DType"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: safetensors' name, e.g. ``BF16``; the canonical one.
        torch_name: attribute of the ``torch`` module, e.g. ``bfloat16``.
        short: the name that users type on a command line, e.g. ``bf16``.
        itemsize: bytes of one element.
    """

    name: str
    torch_name: str
    short: str
    itemsize: int

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype (imports torch)."""
        import torch as _torch

        found: torch.dtype = getattr(_torch, self.torch_name)
        return found

    @property
    def is_float(self) -> bool:
        """Whether engines compute weights in this dtype: a floating-point number of 16 bits or more."""
        return self.short in ("bf16", "fp16", "fp32", "fp64")

    def widens_to(self, other: DType) -> bool:
        """Whether both are floating-point dtypes and ``other`` can represent all numbers of this one, so that the cast
        is exact.
        """
        return self.is_float and other.is_float and self.itemsize < other.itemsize

    def __str__(self) -> str:
        return self.name


DTYPES: tuple[DType, ...] = (
    DType("BOOL", "bool", "bool", 1),
    DType("U8", "uint8", "u8", 1),
    DType("I8", "int8", "i8", 1),
    DType("F8_E4M3", "float8_e4m3fn", "fp8_e4m3", 1),
    DType("F8_E5M2", "float8_e5m2", "fp8_e5m2", 1),
    DType("F8_E8M0", "float8_e8m0fnu", "fp8_e8m0", 1),
    DType("U16", "uint16", "u16", 2),
    DType("I16", "int16", "i16", 2),
    DType("F16", "float16", "fp16", 2),
    DType("BF16", "bfloat16", "bf16", 2),
    DType("U32", "uint32", "u32", 4),
    DType("I32", "int32", "i32", 4),
    DType("F32", "float32", "fp32", 4),
    DType("U64", "uint64", "u64", 8),
    DType("I64", "int64", "i64", 8),
    DType("F64", "float64", "fp64", 8),
    DType("C64", "complex64", "c64", 8),
)

_BY_SAFETENSORS_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_ANY_NAME = {name: d for d in DTYPES for name in (d.name, d.name.lower(), d.torch_name, d.short)}
NAMES: tuple[str, ...] = tuple(_BY_ANY_NAME)
"""All names that `parse` accepts, without ``torch.``."""


def from_safetensors(name: str) -> DType:
    """Return the dtype with this name in a safetensors header.

    Raises:
        InvalidArgument: the dtype does not exist, or its elements are smaller than a byte.
    """
    found = _BY_SAFETENSORS_NAME.get(name)
    if found is None:
        raise InvalidArgument(
            f"dtype {name[:40]!r} is not supported", fix=f"use one of {', '.join(_BY_SAFETENSORS_NAME)}"
        )
    return found


def from_torch(dtype: torch.dtype) -> DType:
    """Return the dtype for a ``torch.dtype``.

    Raises:
        InvalidArgument: safetensors does not support the dtype.
    """
    return parse(dtype)


def parse(dtype: str | torch.dtype | DType) -> DType:
    """Return the dtype for any of its names, ``BF16``, ``bf16``, ``bfloat16``, ``torch.bfloat16``, or for
    ``torch.bfloat16`` itself.

    Raises:
        InvalidArgument: no dtype has that name.
    """
    name = str(dtype)  # works for torch's dtypes too, without importing torch
    found = _BY_ANY_NAME.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidArgument(
            f"{name[:40]!r} is not a known dtype", fix=f"use one of {', '.join(d.short for d in DTYPES)}"
        )
    return found
