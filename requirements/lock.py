"""Writer of the locks: which files of which versions `make install` takes, by their hashes.

``python requirements/lock.py`` resolves the extras of pyproject.toml within constraints.txt, and writes one file for
each: what it needs beyond those before it. torch is in none: its version is pinned, and its files differ from index to
index, by the accelerator that they are for.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent
BASES: Mapping[str, tuple[str, ...]] = {
    "service": (),
    "tracing": ("service",),
    "demo": ("service",),
    "dev": ("service", "tracing", "demo"),
    "bench": ("service", "tracing", "demo", "dev"),
    "fuzz": ("service", "tracing", "demo", "dev"),
    "audit": ("service", "tracing", "demo", "dev"),
    "release": ("service", "tracing", "demo", "dev"),
    "page": ("service", "tracing", "demo", "dev"),
    "docs": ("service", "tracing", "demo", "dev"),
}
"""The extras that are locked, and those whose locks each goes with."""
EXCLUDED = ("torch",)
_OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "setuptools")
"""What torch needs of others, whatever it is built for, and what builds weighbridge."""
_PLATFORM = "x86_64-manylinux_2_31"
"""For which packages are chosen; of each, the hashes of all files are listed."""
_HEAD = """\
# What the extra `{extra}` needs{beyond}, by hash: written by `make lock` from pyproject.toml and constraints.txt.
"""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^ ;\\]+)")


def normal(name: str) -> str:
    """A project's name as all of its spellings have it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and whole text of each requirement in a file of them."""
    joined = re.sub(r"\\\n", "\0", text)
    for line in joined.splitlines():
        found = _PIN.match(line)
        if found is not None:
            yield normal(found["name"]), found["version"], line.replace("\0", "\\\n")


def _resolved(extra: str) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as place:
        more, excluded = Path(place, "more.in"), Path(place, "excluded.txt")
        more.write_text("\n".join(_OF_TORCH))
        excluded.write_text("\n".join(EXCLUDED))
        line = [
            *(
                "uv",
                "pip",
                "compile",
                "pyproject.toml",
                str(more),
                "--extra",
                extra,
                "--constraint",
                "constraints.txt",
            ),
            *(
                "--excludes",
                str(excluded),
                "--generate-hashes",
                "--python-version",
                "3.11",
                "--python-platform",
                _PLATFORM,
            ),
            *("--no-header", "--no-annotate", "--quiet"),
        ]
        made = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return list(entries(made.stdout))


def main() -> None:
    """Write all locks."""
    named: dict[str, set[str]] = {}
    for extra, bases in BASES.items():
        known = {name for base in bases for name in named[base]}
        found = [each for each in _resolved(extra) if each[0] not in known]
        named[extra] = {name for name, _, _ in found}
        beyond = f" beyond {' and '.join(bases)}" if bases else ""
        text = _HEAD.format(extra=extra, beyond=beyond) + "".join(f"{entry}\n" for _, _, entry in found)
        (FOLDER / f"{extra}.txt").write_text(text)


if __name__ == "__main__":
    main()
