"""Does a package bring a family as the documentation says, and is a broken one named as what is in the way?

Entry points here are Python's own, of modules that the tests write.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from weighbridge import TensorParallel
from weighbridge._core import dtypes
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service import families
from weighbridge_service.families import family_of
from weighbridge_service.families.dense import Llama
from weighbridge_service.models.bridges import Bridge, bridge_for
from weighbridge_service.models.engine_layouts import EngineLayouts
from weighbridge_service.models.model_tensors import ModelTensors

CONFIG = {"model_type": "mine"}
_numbers = count()

Bring = Callable[..., None]


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bring]:
    """Let packages bring families, besides those that are there: each a name and what it stands for."""
    there = metadata.entry_points(group=families.GROUP)

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        assert group == families.GROUP
        return [*there, *brought]

    brought: list[metadata.EntryPoint] = []

    def bring(*entries: tuple[str, str]) -> None:
        brought.extend(metadata.EntryPoint(name, value, families.GROUP) for name, value in entries)
        families._registered.cache_clear()

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "entry_points", entry_points)
        yield bring
    families._registered.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module; its name."""

    def write(code: str) -> str:
        name = f"weighbridge_families_of_tests_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return write


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import module_that_is_not_there", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("", "cannot be imported: AttributeError: .* has no attribute 'Mine'"),
        ("class Mine: pass", "is not a class derived from Family"),
        (
            "from weighbridge_service.families import Family\nMine = lambda c: Family(c)",
            "is not a class derived",
        ),
        ("Mine = 'weighbridge_service.families.dense:Llama'", "is not a class derived from Family"),
    ],
)
def test_a_package_whose_family_is_none_is_named(
    bring: Bring, write: Callable[[str], str], code: str, message: str
) -> None:
    value = f"{write(code)}:Mine"
    bring(("mine", value))
    for ask in (family_of, lambda config: bridge_for(b'{"model_type": "mine"}')):
        with pytest.raises(FailedPrecondition, match=message) as caught:
            ask(CONFIG)
        assert f"the family for mine, {value}," in caught.value.message
    # those of others are not touched by it
    assert family_of({"model_type": "llama"}) is Llama


def test_a_package_that_is_not_there_any_more_is_named(bring: Bring) -> None:
    bring(("mine", "package_that_was_uninstalled.families:Mine"))
    with pytest.raises(FailedPrecondition, match=r"package_that_was_uninstalled\.families:Mine") as caught:
        family_of(CONFIG)
    assert "uninstall" in caught.value.fix


@pytest.mark.parametrize("name", ["mine", "llama"])
def test_two_packages_that_bring_one_family_are_both_named(
    bring: Bring, write: Callable[[str], str], name: str
) -> None:
    module = write("from weighbridge_service.families.dense import Llama as Mine, Qwen2 as Other")
    ours = "weighbridge_service.families.dense:Llama" if name == "llama" else f"{module}:Other"
    bring((name, f"{module}:Mine"), (name, ours))
    with pytest.raises(FailedPrecondition, match=f"model type '{name}'") as caught:
        family_of({"model_type": name})
    assert f"{module}:Mine" in caught.value.message
    assert ours in caught.value.message
    assert "uninstall" in caught.value.fix


def test_a_package_that_is_listed_twice_is_one(bring: Bring, write: Callable[[str], str]) -> None:
    """As an editable installation may be."""
    value = f"{write('from weighbridge_service.families.dense import Llama as Mine')}:Mine"
    bring(("mine", value), ("mine", value), ("llama", "weighbridge_service.families.dense:Llama"))
    assert family_of(CONFIG) is Llama
    assert "mine" in families.model_types()
    with pytest.raises(InvalidArgument, match="no weight map") as caught:
        family_of({"model_type": "others"})
    assert "mine" in caught.value.details[0]
    assert value.partition(":")[0] in sys.modules


def test_built_in_families_need_no_installation_and_packages_bring_more(tmp_path: Path) -> None:
    """Python without its site-packages, and so without metadata but that of two packages beside the source tree."""
    for package, entry in (
        ("weighbridge", "llama = of_another_release:Llama"),
        ("other", "mine = other:Mine"),
    ):
        folder = tmp_path / f"{package}-0.0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
        (folder / "entry_points.txt").write_text(f"[{families.GROUP}]\n{entry}\n")
    (tmp_path / "other.py").write_text("from weighbridge_service.families.dense import Llama as Mine\n")
    code = (
        "from weighbridge_service.families import family_of, model_types; "
        "print({name: family_of({'model_type': name}).__name__ for name in model_types()})"
    )
    root = Path(__file__).parents[3]
    path = [str(root / tree) for tree in ("clients", "storage", "service")] + [str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout)
    assert found.pop("mine") == found["llama"] == "Llama"
    documented = (root / "docs/families.md").read_text("utf-8").partition("## A family")[0]
    rows = [
        line.split("|")[1] for line in documented.splitlines() if line.startswith("| `") and "model_type" not in line
    ]
    assert found.keys() == {name.strip("` ") for row in rows for name in row.split(",")}


def test_the_family_of_the_documentation_works_as_it_stands_there() -> None:
    page = (Path(__file__).parents[3] / "docs/families.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    config = {
        "model_type": "my_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    bridge = Bridge(names["MyModel"](config))
    shapes = bridge.hugging_face
    assert shapes["transformer.h.2.attn.k.weight"] == (32, 64)
    assert shapes["transformer.ln_f.weight"] == (64,)
    specs = ModelTensors(dtypes.parse("bf16")).specs(bridge)
    layout = EngineLayouts(specs, lambda: bridge).layout(TensorParallel(2, 1, layers=(2, 3)))
    found = {p.shard.tensor: p.shard.box.extent for p in layout.placements}
    layer = "transformer.h.2."
    assert found == {
        f"{layer}ln_1.weight": (64,), f"{layer}ln_2.weight": (64,),
        f"{layer}attn.q.weight": (32, 64), f"{layer}attn.k.weight": (16, 64), f"{layer}attn.v.weight": (16, 64),
        f"{layer}attn.out.weight": (64, 32), f"{layer}mlp.gate.weight": (48, 64), f"{layer}mlp.up.weight": (48, 64),
        f"{layer}mlp.down.weight": (64, 48), "transformer.ln_f.weight": (64,), "lm_head.weight": (64, 64),
    }  # fmt: skip
