"""Does a vLLM that the plug-in does not know go on without it?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.integrations.vllm import register


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of a release that has nothing but its number."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.19.1'\n")
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(tmp_path)
        yield package
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


@pytest.mark.parametrize("factory", [None, "class WeightTransferEngineFactory: pass\n"], ids=["module", "name"])
def test_a_release_without_what_the_plug_in_needs_is_named_in_the_log_and_goes_on(
    vllm: Path, factory: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if factory is not None:
        folder = vllm / "distributed" / "weight_transfer"
        folder.mkdir(parents=True)
        (folder / "factory.py").write_text(factory)
    register()
    [said] = [each.getMessage() for each in caplog.records if "vLLM" in each.getMessage()]
    assert said.startswith("weighbridge does not work in vLLM 0.19.1")
