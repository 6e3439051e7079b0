"""Is a package that brings a family, and is broken, named as what is in the way?

Entry points here are Python's own, of modules that the tests write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import count
from pathlib import Path

import pytest

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service import families
from weighbridge_service.bridges import bridge_for
from weighbridge_service.families import family_of
from weighbridge_service.families.dense import Llama

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
        ("class Mine: pass", "is no class derived from Family"),
        (
            "from weighbridge_service.families import Family\nMine = lambda c: Family(c)",
            "is no class derived",
        ),
        ("Mine = 'weighbridge_service.families.dense:Llama'", "is no class derived from Family"),
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
    assert "mine" in caught.value.fix
    assert value.partition(":")[0] in sys.modules
