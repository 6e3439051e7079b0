"""Does nothing unpickle, or run, what came from outside?

Python tells an audit hook of each name that an unpickler looks up, and of each program that is started. So a service is
asked for what it does with what others have sent, and the hook says what was looked up meanwhile.
"""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import weighbridge
import weighbridge_service
import weighbridge_storage
from tests.support.forked import forked_python

_RUNS = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "numpy": {"load"},
    "np": {"load"},
    "yaml": {"load", "unsafe_load", "full_load"},
}
_OWN = {
    # what a conversion's parent says to its workers, by a pipe of its own
    "weighbridge_service/converting/worker.py": {"pickle.loads"},
}
_PACKAGES = [Path(str(each.__file__)).parent for each in (weighbridge, weighbridge_storage, weighbridge_service)]


def _runs(path: Path) -> set[str]:
    """Calls in a file that run what they read, and names that it imports from modules whose functions do."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in _RUNS:
            found |= {f"{node.module}.{each.name}" for each in node.names if each.name in _RUNS[node.module]}
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile", "__import__"):
            found.add(node.func.id)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            module, name = node.func.value.id, node.func.attr
            inert = any(
                each.arg == "weights_only" and getattr(each.value, "value", None) is True for each in node.keywords
            )
            if name in _RUNS.get(module, ()) and not inert:
                found.add(f"{module}.{name}")
    return found


def test_no_module_of_ours_runs_what_it_reads_but_what_its_own_parent_says() -> None:
    found = {}
    for package in _PACKAGES:
        for path in package.rglob("*.py"):
            if calls := _runs(path):
                found[str(path.relative_to(package.parent))] = calls
    assert found == _OWN


def test_the_look_at_calls_sees_them(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("import pickle\nfrom torch import load\npickle.loads(b'')\nexec('1')\n")
    assert _runs(source) == {"pickle.loads", "torch.load", "exec"}
    source.write_text("torch.load(x, weights_only=True)\n")
    assert _runs(source) == set()
    source.write_text("torch.load(x, weights_only=y)\n")
    assert _runs(source) == {"torch.load"}


_PROGRAM = """
import json, os, sys, threading
looked_up = []
watching = threading.Event()

def hook(event, arguments):
    if watching.is_set() and event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        looked_up.append((event, [str(each)[:80] for each in arguments], sys._getframe(1).f_code.co_filename))

sys.addaudithook(hook)

from pathlib import Path
from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import WeighbridgeError
from weighbridge._trainers.torch_dist.folder import read_torch_dist

folder, evil = Path(sys.argv[1]), Path(sys.argv[2])
source = tiny_folder(folder / "hf")
with running_service(folder / "store") as running:
    with TrainerClient(running.address) as trainer:
        trainer.register_model("a/b", source.folder)  # its weight map comes from a process of the service's own
        watching.set()
        trainer.push_folder("a/b", source.folder, step=1).wait(timeout=60)
        try:
            read_torch_dist(evil)
            refused = ""
        except WeighbridgeError as error:
            refused = str(error)
    with EngineClient(running.address) as engine:
        assert len(dict(engine.pull("a/b"))) == len(source.arrays)
watching.clear()
print(json.dumps({"looked_up": looked_up, "refused": refused}))
"""


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, ("touch /tmp/weighbridge-was-here",)


@pytest.mark.process
def test_a_service_that_is_pushed_to_and_pulled_from_looks_up_nothing_that_was_sent(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / ".metadata").write_bytes(pickle.dumps(_Evil()))
    (evil / "__0_0.distcp").write_bytes(pickle.dumps(_Evil()))
    (tmp_path / "work").mkdir()
    with forked_python("-c", _PROGRAM, str(tmp_path / "work"), str(evil)) as process:
        found = json.loads(process.stdout.read().splitlines()[-1])
    assert found["looked_up"] == []
    assert "os.system" in found["refused"] or "posix.system" in found["refused"]


def test_the_audit_hook_hears_of_what_an_unpickler_looks_up() -> None:
    program = (
        "import pickle, sys\nheard = []\n"
        "sys.addaudithook(lambda event, arguments: heard.append(event))\n"
        "pickle.loads(pickle.dumps(len))\nassert 'pickle.find_class' in heard"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.process
def test_a_running_service_has_not_imported_what_could_load_a_checkpoint() -> None:
    program = (
        "import sys, weighbridge_service.server\n"
        "assert not {'torch', 'transformers', 'mbridge', 'megatron.core'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
