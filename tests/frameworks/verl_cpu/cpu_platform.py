"""A platform that lets verl 0.9 run on CPUs, without pinned memory.

Loaded by ``VERL_USE_EXTERNAL_MODULES`` in each process.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry

RESOURCE = "TEST_CPU"
"""Ray's resource that workers take in place of a GPU."""


class _Device(types.ModuleType):
    """A stub of the part of ``torch.cuda`` that verl calls."""

    def is_available(self) -> bool:
        return False

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="test_cpu")
class CpuPlatform(PlatformBase):
    """A CPU that verl takes for an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "TEST_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return RESOURCE

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def manual_seed(self, seed: int) -> None: ...
    def manual_seed_all(self, seed: int) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...
    def cudart(self) -> None: ...


class _Unpinned(torch.distributed.fsdp.CPUOffloadPolicy):
    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


torch.distributed.fsdp.CPUOffloadPolicy = _Unpinned  # type: ignore[misc]

_init_process_group = torch.distributed.init_process_group


def _on_gloo(backend: str | None = None, **arguments: Any) -> None:
    _init_process_group("gloo", **arguments)


torch.distributed.init_process_group = _on_gloo
