"""Are packs for GPU machines made of exact versions, that leave the machine's torch in place and have what weighbridge
needs?
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.pack import HERE, LAYERS, MACHINE, ROOT, write_plugins

COMPILED_FOR_EACH_OTHER = {"torch", "triton", "numpy"}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (HERE / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"{name}.txt: {line}"
    found = {canonicalize_name(project): version for project, version in (line.split("==") for line in lines)}
    assert len(found) == len(lines), f"{name}.txt lists a package twice"
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_list_has_exact_versions_and_leaves_the_machines_torch_in_place(name: str) -> None:
    listed = pins(name).keys()
    assert listed
    if name != MACHINE:
        assert not listed & COMPILED_FOR_EACH_OTHER
        # nvidia-ml-py is Python alone, and calls the driver's library
        assert not [each for each in listed - {"nvidia-ml-py"} if each.startswith("nvidia-")]


def test_every_list_is_of_a_layer() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == LAYERS.keys()


def test_an_engines_pack_has_what_weighbridge_and_its_service_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = pins(MACHINE) | pins("vllm")
    needed = map(Requirement, project["dependencies"] + project["optional-dependencies"]["service"])
    unmet = [str(each) for each in needed if there.get(canonicalize_name(each.name), "0") not in each.specifier]
    assert not unmet


def test_a_pack_tells_engines_of_the_plugins(tmp_path: Path) -> None:
    write_plugins(tmp_path)
    (packed,) = metadata.distributions(path=[str(tmp_path)])
    installed = metadata.distribution("weighbridge")
    assert (packed.name, packed.version) == (installed.name, installed.version)
    groups = {"vllm.general_plugins", "sglang.srt.plugins"}
    assert {(each.group, each.name, each.value) for each in packed.entry_points} == {
        (each.group, each.name, each.value) for each in installed.entry_points if each.group in groups
    }
