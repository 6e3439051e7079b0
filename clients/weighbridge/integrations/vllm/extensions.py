"""Worker extension of an engine that has another one too, such as verl's.

vLLM accepts one extension, and each worker imports it by its qualified name. Here the name of an attribute is the other
extension's qualified name, with colons instead of dots. An engine whose worker has had the other extension before, in
the same process, cannot get both.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from weighbridge.integrations.vllm.worker import WorkerExtension


@functools.cache  # the same class each time: vLLM adds a class to its worker's bases only once
def __getattr__(name: str) -> type[Any]:
    """Class with the methods of another extension and of `WorkerExtension`.

    Raises:
        AttributeError: the name contains no colon, or that extension does not exist.
        ImportError: the other extension's module cannot be imported.
    """
    module, _, qualified = name.rpartition(":")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    other: type[Any] = getattr(importlib.import_module(module.replace(":", ".")), qualified)
    return other if issubclass(other, WorkerExtension) else type(other.__name__, (other, WorkerExtension), {})
