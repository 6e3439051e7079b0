"""Imports of modules as on an H100, where there is none: prints those that fail, and exits with their number.

torch believes that there is a card; nothing is computed. `tests.gpu.stubs` are the libraries.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from types import SimpleNamespace
from unittest.mock import patch

CARD = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)


def failing(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported, each printed with the end of its traceback."""
    import torch

    found = []
    with patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        _device_count_nvml=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: CARD.name,
        get_device_capability=lambda device=None: (CARD.major, CARD.minor),
        get_device_properties=lambda device=None: CARD,
    ):
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                print(f"{name}:\n{traceback.format_exc(limit=-3)}", flush=True)
                found.append(name)
    return found


if __name__ == "__main__":
    sys.exit(len(failing(sys.argv[1:])))
