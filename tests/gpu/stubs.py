"""Libraries of CUDA and of its driver that answer nothing: with them what was compiled for a card is loaded where there
is none.

The real ones are 3 GB and want a driver. A stub has the symbols and versions that are asked of the library; a call says
that there is no device.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_NEEDED = re.compile(r"^  NEEDED +(lib(?:cu|nv|nccl)\S+)$", re.MULTILINE)
_ASKED = re.compile(r"^  required from (\S+):\n((?:    .*\n)+)", re.MULTILINE)
_SYMBOL = re.compile(r" U ((?:cu|nv|nccl|__cuda)\w+)(?:@+(\S+))?$", re.MULTILINE)
_RUNTIME = "libcudart.so"
"""Of CUDA, which all others stand on."""
_NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { strncpy(name, "NVIDIA H100", size); return 0; }
"""
"""The management library, by which vLLM and Ray find cards: it tells of one H100."""


def build_stubs(folders: Sequence[Path], into: Path) -> Path:
    """Stubs of all CUDA libraries that libraries in these folders need, in a folder for LD_LIBRARY_PATH."""
    into.mkdir(parents=True, exist_ok=True)
    libraries = [path for folder in folders for path in folder.rglob("*.so*") if path.is_file()]
    headers = _tool(["objdump", "-p"], libraries)
    needed = set(_NEEDED.findall(headers)) - {path.name for path in libraries}
    # torch's is the newest: others are needed by what serves several releases of CUDA
    runtime = max(library for library in needed if library.startswith(_RUNTIME))
    asked = [(library, lines) for library, lines in _ASKED.findall(headers) if library in needed]
    owners = {line.split()[-1]: library for library, lines in asked for line in lines.splitlines()}
    symbols: dict[str, dict[str, str]] = {library: {} for library in needed}
    for symbol, version in _SYMBOL.findall(_tool(["nm", "-D", "--undefined-only"], libraries)):
        # one without a version may be in any library that is loaded
        symbols[owners.get(version, runtime)][symbol] = version if version in owners else ""
    for library, versions in symbols.items():
        source = "\n".join(map(_function, versions))
        _compile(into / library, source, versions)
    _compile(into / "libnvidia-ml.so.1", _NVML, {})
    return into


def _function(symbol: str) -> str:
    if "String" in symbol:
        return f'const char *{symbol}(void) {{ return ""; }}'
    return f"int {symbol}(void) {{ return 100; }}"  # CUDA_ERROR_NO_DEVICE


def _compile(library: Path, source: str, versions: Mapping[str, str]) -> None:
    """A library of C, in which symbols have these versions, if any."""
    nodes = [
        f"{node} {{ {'; '.join(symbol for symbol, version in versions.items() if version == node)}; }};"
        for node in sorted(set(versions.values()) - {""})
    ]
    script = library.with_name(f"{library.name}.map")
    script.write_text("\n".join(nodes))
    options = [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if nodes else [])]
    command: list[str | Path] = ["gcc", "-shared", "-fPIC", "-w", *options, "-o", library, "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)


def _tool(command: Sequence[str], files: Sequence[Path]) -> str:
    """Output of a tool of binutils for files; it complains of those that are no libraries."""
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    return done.stdout
