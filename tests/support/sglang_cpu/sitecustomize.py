"""Names without code for what SGLang imports on any machine and has for GPUs alone; put this folder on PYTHONPATH.

SGLang 0.5.23 has no package of kernels for CPUs on PyPI, and torchvision's wheels there need CUDA. Whatever is computed
by one of these names fails; constructing a model, loading its weights and everything that plain PyTorch computes needs
none of them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

STOOD_IN_FOR = ("torchvision", "sgl_kernel")


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0"  # older than whatever asks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in STOOD_IN_FOR:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _BeforeAdapters(importlib.abc.MetaPathFinder):
    """Sees SGLang import its layers with adapters, and finds nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> None:
        if name == "sglang.srt.lora.layers":
            _unpinned()


def _unpinned() -> None:
    """Let torch take no notice of ``pin_memory``: SGLang's layers with adapters pin memory on any machine, and torch
    refuses to without an accelerator.
    """
    import torch

    for name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign]


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return made


def _itself(tensor: Any, *_: Any) -> Any:
    return tensor


sys.meta_path.append(_Finder())
sys.meta_path.insert(0, _BeforeAdapters())
