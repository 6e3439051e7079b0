"""What SGLang imports on any machine and only has for GPUs, stood in for by names without code; put this folder on PYTHONPATH.

SGLang 0.5.23 has no package of kernels for CPUs on PyPI, and torchvision's wheels there need CUDA. Whatever is computed by one of
these names fails; constructing a model, loading its weights and everything that plain PyTorch computes needs none of them.
"""

from __future__ import annotations

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


sys.meta_path.append(_Finder())
