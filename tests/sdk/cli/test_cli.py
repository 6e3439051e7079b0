"""Does each command do what its help says on a real service, and fail with a message that names the fix?"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.held_shards import NotSelected
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient, __version__
from weighbridge._cli import commands, looking, main
from weighbridge._cli.parsing import Reference, parse_reference
from weighbridge._cli.serving import serve_command
from weighbridge._clients.rank_stream import RankStream
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.sizes import parse_size, readable_size
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError
from weighbridge_service.runtime.config import ServiceConfig

MODEL = "acme/tiny"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[RunningService]:
    with running_service(store) as running:
        yield running


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny_model(tiny_config("llama", tied=False), seed=7).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"not": "read"}')
    return folder


@pytest.fixture(scope="module")
def imported(service: RunningService, hf_dir: Path) -> dict[str, Any]:
    """The output of `weighbridge import --json` for version 1 of the model."""
    return as_json(weighbridge(service, "import", hf_dir, MODEL, "--step", 4))


@pytest.fixture(scope="module")
def weights(hf_dir: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(hf_dir / "model.safetensors")
    return found


def weighbridge(service: RunningService | None, command: str, *args: object, json: bool = True) -> Result:
    """Run a command in this process."""
    server = ["--server", service.address] if service else []
    line = [command, *map(str, args), *server, *(["--json"] if json else [])]
    return CliRunner().invoke(commands, line)


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    assert not result.stderr
    return json.loads(result.stdout)


def error_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout).values()
    assert set(error) == {"reason", "message", "fix", "details"}
    assert isinstance(error, dict)
    return error


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def process(*args: object, **options: Any) -> subprocess.Popen[str]:
    """Start the console script's function in a process of its own."""
    code = "import sys; from weighbridge._cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


# -- what people type ----------------------------------------------------------------------------------------------------


def test_a_reference_is_a_model_and_a_version() -> None:
    assert parse_reference("acme/smol@latest") == Reference("acme/smol", "latest")
    assert parse_reference("acme/smol@17") == Reference("acme/smol", "17")
    assert parse_reference("acme/smol", need_version=False) == Reference("acme/smol", "")
    for text in ("acme/smol", "acme/smol@", "@latest", "a/b@1@2", ""):
        with pytest.raises(InvalidArgument):
            parse_reference(text)


def test_sizes_are_read_in_thousands_and_in_1024s() -> None:
    expected = {
        "5GB": 5 * 10**9,
        "500MB": 5 * 10**8,
        "2GiB": 2 << 30,
        "1.5kb": 1500,
        "64 MiB": 64 << 20,
        "1000": 1000,
    }
    assert {text: parse_size(text) for text in expected} == expected
    for text in ("", "GB", "-1GB", "0", "5G", "five", "1e9", "5GB5", "0.1B", "٣GB"):
        with pytest.raises(InvalidArgument, match="is not a size"):
            parse_size(text)
    assert [readable_size(n) for n in (0, 999, 1000, 999_960, 5 * 10**9, 2 * 10**15)] == [
        "0 B", "999 B", "1.0 kB", "1.0 MB", "5.0 GB", "2000.0 TB",
    ]  # fmt: skip


MISSPELT = pytest.mark.parametrize(
    ("line", "says"),
    [
        (["export", "acme/tiny@latest", "DIR", "--max-shard-size", "5 bananas"], "is not a size"),
        (["pull", "acme/tiny", "--out", "DIR"], "acme/tiny@latest"),
        (["tag", "acme/tiny", "prod"], "acme/tiny@latest"),
        (["pull", "acme/tiny@1", "--out", "DIR", "--tp-size", "2"], "--tp-rank is missing"),
        (["restore", "acme/tiny@1", "--out", "DIR", "--pp-rank", "0"], "--pp-size is missing"),
        (["restore", "acme/tiny@1", "--out", "DIR", "--tp-size", "0", "--tp-rank", "0"], "--tp-size"),
        (["push", "DIR", "acme/tiny"], "--step"),
        (["export", "acme/tiny@latest"], "Missing argument"),
        (["show", "acme/tiny", "--everything"], "No such option"),
        (["retention", "acme/tiny", "--keep-last", "many"], "is not a valid integer"),
        (["fly"], "No such command"),
    ],
)


@MISSPELT
def test_what_is_misspelt_ends_with_2_and_says_how_to_write_it(line: list[str], says: str) -> None:
    result = CliRunner().invoke(commands, line)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert not result.stdout


@MISSPELT
def test_what_is_misspelt_is_an_error_in_json_if_that_is_asked_for(
    capfd: pytest.CaptureFixture[str], line: list[str], says: str
) -> None:
    for arguments in ([*line, "--json"], [line[0], "--json", *line[1:]]):
        assert main(arguments) == 2
        out, err = capfd.readouterr()
        assert not err
        (error,) = json.loads(out).values()
        assert set(error) == {"reason", "message", "fix", "details"}
        assert error["reason"] == "INVALID_ARGUMENT"
        assert says in error["message"]
        assert re.fullmatch(r"see `weighbridge( \w+)? --help`", error["fix"])


def test_behind_the_end_of_the_options_json_is_an_argument(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fly", "--", "--json"]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert "Usage: weighbridge" in err


# -- the process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [["--help"], ["pull", "--help"], ["serve", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    code = (
        "import sys; from weighbridge._cli import main; assert main(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'grpc', 'numpy', 'rich', 'transformers', 'mbridge', "
        "'weighbridge_service'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: weighbridge" in done.stdout or __version__ in done.stdout


def test_the_version_is_shown_with_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge._cli.commit", lambda: "1a2b3c4d")
    assert CliRunner().invoke(commands, ["--version"]).stdout == f"weighbridge {__version__} (commit 1a2b3c4d)\n"
    monkeypatch.setattr("weighbridge._cli.commit", lambda: None)
    assert CliRunner().invoke(commands, ["--version"]).stdout == f"weighbridge {__version__} (commit unknown)\n"


@pytest.mark.smoke
def test_help_lists_every_command_with_a_whole_sentence() -> None:
    result = CliRunner().invoke(commands, ["--help"])
    sections = result.stdout.partition("Show this message and exit.\n")[2].splitlines()
    listed = [line for line in sections if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == commands.list_commands(None)  # type: ignore[arg-type]
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_serve_has_the_defaults_of_the_service() -> None:
    defaults = {param.name: param.default for param in serve_command.params}
    config = ServiceConfig(Path("x"))
    assert (defaults["memory_budget"], config.memory_budget) == ("auto", None)
    assert (defaults["spill_budget"], config.spill_budget) == ("auto", None)
    assert parse_size(str(defaults["read_cache"])) == config.read_cache
    assert defaults["receive_timeout"] == config.receive_timeout
    assert defaults["drain_seconds"] == config.drain_seconds


@pytest.mark.parametrize("store", ["http://x/y", "gs://bucket", "s3:"])
def test_serve_refuses_what_is_neither_a_folder_nor_s3(store: str, tmp_path: Path) -> None:
    store = store if "://" in store else str(tmp_path / "file")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(commands, ["serve", "--store", store])
    assert result.exit_code == 2
    assert "neither a folder nor s3://" in result.stderr or "is a file" in result.stderr


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "weighbridge_service.server", None)
    result = CliRunner().invoke(commands, ["serve"])
    assert result.exit_code == 1
    assert "pip install 'weighbridge[service]'" in result.stderr
    for line in (
        ["pull", "a/b@1", "--out", "x"],
        ["import", ".", "a/b"],
        ["push", ".", "a/b", "--step", "1"],
        ["diff", "a/b", "1", "2"],
    ):
        result = CliRunner().invoke(commands, line)
        assert "torch is not installed" in result.stderr, line
        assert "pip install 'weighbridge[torch]'" in result.stderr, line


def test_a_service_that_is_not_there_is_an_error_within_seconds() -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        running = [process("models", env={**os.environ, "WEIGHBRIDGE_SERVER": address}),
                   process("watch", "a/b", "--server", address)]  # fmt: skip
        for one in running:
            out, err = one.communicate(timeout=60)
            assert one.returncode == 1
            assert not out
            assert f"the service at {address} cannot be reached" in err
            assert "What to do: start it with `weighbridge serve`" in err
            assert "Traceback" not in err


def test_an_interrupt_ends_quietly_with_130(service: RunningService, imported: dict[str, Any]) -> None:
    watching = process("watch", MODEL, "--server", service.address)
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith(f"{MODEL}@")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert not err.strip()


def test_a_reader_that_goes_away_is_no_error(service: RunningService, imported: dict[str, Any]) -> None:
    for args in (["show", MODEL, "--tensors"], ["versions", MODEL, "--json"]):
        read, write = os.pipe()
        os.close(read)
        showing = process(*args, "--server", service.address, stdout=write)
        os.close(write)
        _, err = showing.communicate(timeout=60)
        assert not err
        assert showing.returncode == 1


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    service: RunningService, imported: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    args = [
        "pull",
        f"{MODEL}@1",
        "--out",
        tmp_path / "x",
        "--tp-size",
        1,
        "--tp-rank",
        0,
        "--server",
        service.address,
    ]
    pulling = process(*args, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while pulling.poll() is None or b"pulling" not in shown:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    out, _ = pulling.communicate(timeout=60)
    assert pulling.returncode == 0, shown.decode()
    assert b"pulling acme/tiny@1" in shown
    assert out.startswith("acme/tiny@1 (durable, step 4): ")


# -- moving --------------------------------------------------------------------------------------------------------------


def test_import_waits_until_the_version_is_durable(imported: dict[str, Any], store: Path, hf_dir: Path) -> None:
    assert (imported["model"], imported["number"], imported["step"]) == (MODEL, 1, 4)
    assert imported["state"] == "durable"
    folder = store / "models" / MODEL / "versions" / "000000000001"
    same(load_file(folder / "model.safetensors"), load_file(hf_dir / "model.safetensors"))


def test_pull_writes_a_folder_that_transformers_loads(
    service: RunningService, imported: dict[str, Any], hf_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "here"
    report = as_json(weighbridge(service, "pull", f"{MODEL}@1", "--out", out))
    assert report["version"] == imported
    assert report["files"] == sorted(path.name for path in out.iterdir())
    assert report["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert (out / "tokenizer.json").read_bytes() == (hf_dir / "tokenizer.json").read_bytes()
    loaded, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, hf_dir))
    same(loaded.state_dict(), original.state_dict())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_slices_of_all_ranks_are_the_whole(
    service: RunningService, imported: dict[str, Any], weights: dict[str, Tensor], tmp_path: Path, size: int
) -> None:
    parts = []
    for rank in range(size):
        args = ["--out", tmp_path, "--tp-size", size, "--tp-rank", rank]
        report = as_json(weighbridge(service, "pull", f"{MODEL}@1", *args))
        assert report["files"] == [f"model-tp{rank}-of-{size}.safetensors", "config.json"]
        parts.append(load_file(tmp_path / report["files"][0]))
    axes = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
    for name, whole in weights.items():
        kind = name.split(".")[-2]
        axis = axes.get(kind)
        if kind == "lm_head" or kind == "embed_tokens":  # vocabulary: cut along the rows, or not at all
            axis = 0 if parts[0][name].shape != whole.shape else None
        if axis is None:
            assert all(torch.equal(part[name], whole) for part in parts), name
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], dim=axis), whole), name
    assert all(part.keys() == weights.keys() for part in parts)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert not list(tmp_path.glob(".*"))


def test_a_rank_file_says_which_part_of_each_tensor_it_holds(
    service: RunningService, imported: dict[str, Any], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    as_json(weighbridge(service, "pull", f"{MODEL}@1", "--out", tmp_path, "--tp-size", 4, "--tp-rank", 3))
    with safe_open(tmp_path / "model-tp3-of-4.safetensors", "pt") as file:
        about = file.metadata()
        assert (about["model"], about["version"]) == (MODEL, "1")
        assert (about["format"], about["tensor_parallel_rank"]) == ("pt", "3")
        for name, shard in json.loads(about["shards"]).items():
            assert shard["shape"] == list(weights[name].shape)
            (box,) = shard["boxes"]
            where = tuple(slice(o, o + e) for o, e in zip(box["offset"], box["extent"], strict=True))
            assert torch.equal(file.get_tensor(name), weights[name][where])


def _as_megatron(hf: Mapping[str, Tensor], tp: int, rank: int, pp: int, stage: int) -> dict[str, Tensor]:
    """The tensors of the tiny llama that a Megatron-core rank holds, computed by hand."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, dim=0)[rank]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, dim=1)[rank]

    found = {}
    if stage == 0:
        found["embedding.word_embeddings.weight"] = rows(hf["model.embed_tokens.weight"])
    for layer in range(4 * stage // pp, 4 * (stage + 1) // pp):
        there, here = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (hf[f"{there}.self_attn.{x}_proj.weight"].view(4, -1, 64) for x in "qkv")  # 4 groups of heads
        gate, up = (hf[f"{there}.mlp.{x}_proj.weight"] for x in ("gate", "up"))
        found[f"{here}.self_attention.linear_qkv.layer_norm_weight"] = hf[f"{there}.input_layernorm.weight"]
        found[f"{here}.self_attention.linear_qkv.weight"] = rows(torch.cat([q, k, v], dim=1).reshape(-1, 64))
        found[f"{here}.self_attention.linear_proj.weight"] = columns(hf[f"{there}.self_attn.o_proj.weight"])
        found[f"{here}.mlp.linear_fc1.layer_norm_weight"] = hf[f"{there}.post_attention_layernorm.weight"]
        found[f"{here}.mlp.linear_fc1.weight"] = torch.cat([rows(gate), rows(up)])
        found[f"{here}.mlp.linear_fc2.weight"] = columns(hf[f"{there}.mlp.down_proj.weight"])
    if stage == pp - 1:
        found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        found["output_layer.weight"] = rows(hf["lm_head.weight"])
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
def test_restore_writes_what_each_megatron_rank_holds(
    service: RunningService,
    imported: dict[str, Any],
    weights: dict[str, Tensor],
    tmp_path: Path,
    tp: int,
    pp: int,
) -> None:
    for rank in range(tp):
        for stage in range(pp):
            sizes = ["--tp-size", tp, "--tp-rank", rank, "--pp-size", pp, "--pp-rank", stage]
            args = [] if tp == pp == 1 else sizes
            report = as_json(weighbridge(service, "restore", f"{MODEL}@latest", "--out", tmp_path, *args))
            assert report["files"] == [f"megatron-tp{rank}-of-{tp}-pp{stage}-of-{pp}.safetensors"]
            assert report["version"]["number"] == 1
            path = tmp_path / report["files"][0]
            expected = _as_megatron(weights, tp, rank, pp, stage)
            same(load_file(path), expected)
            with safe_open(path, "pt") as file:
                shards = json.loads(file.metadata()["shards"])
            fc1 = shards[f"decoder.layers.{4 * stage // pp}.mlp.linear_fc1.weight"]
            assert fc1 == {
                "shape": [192, 64],
                "boxes": [{"offset": [half + 96 // tp * rank, 0], "extent": [96 // tp, 64]} for half in (0, 96)],
            }


def test_export_casts_and_splits_into_files(
    service: RunningService, imported: dict[str, Any], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    args = [f"{MODEL}@latest", tmp_path, "--dtype", "bf16", "--max-shard-size", "40kB"]
    report = as_json(weighbridge(service, "export", *args))
    files = [name for name in report["files"] if name.endswith(".safetensors")]
    assert len(files) > 3
    assert all((tmp_path / name).stat().st_size < 45_000 for name in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_push_adds_a_version(service: RunningService, hf_dir: Path, tmp_path: Path) -> None:
    as_json(weighbridge(service, "import", hf_dir, "acme/pushed"))
    changed = AutoModelForCausalLM.from_pretrained(hf_dir)
    with torch.no_grad():
        changed.lm_head.weight.neg_()
    changed.save_pretrained(tmp_path / "changed", max_shard_size="100kB")
    result = weighbridge(service, "push", tmp_path / "changed", "acme/pushed", "--step", 9, "--run", "r", json=False)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("acme/pushed@2 (durable, step 9): ")
    assert not result.stderr
    as_json(weighbridge(service, "pull", "acme/pushed@latest", "--out", tmp_path / "pulled"))
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "pulled").state_dict(), changed.state_dict())
    assert [v["run"] for v in as_json(weighbridge(service, "versions", "acme/pushed"))] == ["r", "import"]


def test_import_casts_as_pull_and_export_do(
    service: RunningService, hf_dir: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    done = weighbridge(service, "import", hf_dir, "acme/cast", "--dtype", "bf16", json=False)
    assert done.exit_code == 0, done.output
    assert f"{len(weights)} tensors were cast to the model's dtype (rounded)" in done.stderr
    assert as_json(weighbridge(service, "show", "acme/cast"))["model"]["dtype"] == "BF16"
    as_json(weighbridge(service, "export", "acme/cast@latest", tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16, "its config says so, too"
    same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in weights.items()})
    kept = weighbridge(service, "import", hf_dir, "acme/kept", "--dtype", "float32", json=False)
    assert (kept.exit_code, kept.stderr) == (0, ""), "nothing was cast"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dtype", "int8"], "cannot be cast to"),
        (["--dtype", "bf17"], "bf17"),
        (["--dtype", "bf16", "--dequantize", "bf16"], "not both"),
    ],
)
def test_a_dtype_that_weights_cannot_be_cast_to_registers_nothing(
    service: RunningService, hf_dir: Path, options: list[str], says: str
) -> None:
    assert says in error_of(weighbridge(service, "import", hf_dir, "acme/wrong", *options))["message"]
    assert error_of(weighbridge(service, "show", "acme/wrong"))["reason"] == "NOT_FOUND"


def test_register_takes_a_folder_without_its_weights_and_a_dtype_for_what_is_pushed(
    service: RunningService, hf_dir: Path, weights: dict[str, Tensor]
) -> None:
    said = weighbridge(service, "register", hf_dir, "acme/registered", "--dtype", "bf16", json=False)
    assert said.stdout.startswith(f"acme/registered: llama, {len(weights)} tensors in BF16, ")
    shown = as_json(weighbridge(service, "show", "acme/registered"))
    assert (shown["model"]["dtype"], shown["version"]) == ("BF16", None)
    with EngineClient(service.address) as engine:
        config = json.loads(engine.model_files("acme/registered")["config.json"])
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"
        weighbridge(service, "push", hf_dir, "acme/registered", "--step", 1)
        pulled = dict(engine.pull("acme/registered"))
    same(pulled, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert as_json(weighbridge(service, "register", hf_dir, "acme/plain"))["dtype"] == "F32"


def test_import_records_the_step_that_the_folder_says(service: RunningService, hf_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt" / "step-123"
    shutil.copytree(hf_dir, folder)

    def step(*options: object) -> int:
        found: int = as_json(weighbridge(service, "import", folder, "acme/steps", *options))["step"]
        return found

    assert step() == 123
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 120, "log_history": []}))
    assert step() == 120, "what transformers' Trainer has written counts more than a name"
    assert step("--step", 7) == 7


def test_versions_are_listed_up_to_a_limit_with_the_refs_that_name_each(service: RunningService, hf_dir: Path) -> None:
    model = "acme/listed"
    as_json(weighbridge(service, "import", hf_dir, model))
    for step in (1, 2):
        as_json(weighbridge(service, "push", hf_dir, model, "--step", step))
    as_json(weighbridge(service, "tag", f"{model}@1", "prod"))
    listed = as_json(weighbridge(service, "versions", model))
    assert [(each["number"], each["refs"]) for each in listed] == [
        (3, ["latest", "live"]),
        (2, []),
        (1, ["prod"]),
    ]
    assert as_json(weighbridge(service, "versions", model, "--limit", 2)) == listed[:2]
    assert weighbridge(service, "versions", model, "--limit", 0).exit_code == 2


def test_import_believes_the_weights_rather_than_the_config(
    service: RunningService, hf_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(hf_dir, tmp_path / "hf")
    config = json.loads((hf_dir / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    as_json(weighbridge(service, "import", tmp_path / "hf", "acme/believed"))
    assert as_json(weighbridge(service, "show", "acme/believed"))["model"]["dtype"] == "F32"


def test_nothing_is_written_over(
    service: RunningService, imported: dict[str, Any], hf_dir: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "config.json"
    precious.write_text("{}")
    for args in (["pull", f"{MODEL}@1", "--out", tmp_path], ["export", f"{MODEL}@1", tmp_path]):
        assert "is not an empty folder" in error_of(weighbridge(service, *args))["message"]
    slices = ["--tp-size", 1, "--tp-rank", 0]
    error = error_of(weighbridge(service, "pull", f"{MODEL}@1", "--out", tmp_path, *slices))
    assert "belongs to another model" in error["message"]
    as_json(weighbridge(service, "restore", f"{MODEL}@1", "--out", tmp_path))  # has no config.json
    error = error_of(weighbridge(service, "restore", f"{MODEL}@1", "--out", tmp_path))
    assert "megatron-tp0-of-1-pp0-of-1.safetensors exists" in error["message"]
    assert precious.read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pull_that_fails_leaves_nothing_behind(
    service: RunningService,
    imported: dict[str, Any],
    hf_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    for args in ([], ["--tp-size", 2, "--tp-rank", 1]):
        error = error_of(weighbridge(service, "pull", f"{MODEL}@1", "--out", tmp_path / "out", *args))
        assert "No space left on device" in error["message"]
        assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["show", "acme/none"], "NOT_FOUND"),
        (["versions", "acme/none"], "NOT_FOUND"),
        (["watch", "no-slash"], "INVALID_ARGUMENT"),
        (["pull", "acme/none@latest", "--out", "OUT"], "NOT_FOUND"),
        (["pull", f"{MODEL}@99", "--out", "OUT"], "NOT_FOUND"),
        (["restore", f"{MODEL}@nope", "--out", "OUT"], "NOT_FOUND"),
        (["pull", f"{MODEL}@1", "--out", "OUT", "--tp-size", 2, "--tp-rank", 2], "INVALID_ARGUMENT"),
        (["restore", f"{MODEL}@1", "--out", "OUT", "--tp-size", 3, "--tp-rank", 0], "INVALID_ARGUMENT"),
        (["export", f"{MODEL}@1", "OUT", "--dtype", "bf17"], "INVALID_ARGUMENT"),
        (["tag", f"{MODEL}@1", "latest"], "INVALID_ARGUMENT"),
        (["tag", MODEL, "no-such-tag", "--delete"], "NOT_FOUND"),
        (["import", "OUT", "acme/none"], "NOT_FOUND"),
        (["show", "no-slash"], "INVALID_ARGUMENT"),
    ],
)
def test_errors_say_what_is_wrong_and_write_nothing(
    service: RunningService, imported: dict[str, Any], tmp_path: Path, args: list[Any], reason: str
) -> None:
    line = [tmp_path / "out" if arg == "OUT" else arg for arg in args]
    assert error_of(weighbridge(service, *line))["reason"] == reason
    plain = weighbridge(service, *line, json=False)
    assert plain.exit_code == 1
    assert plain.stderr.startswith("Error: ")
    assert not plain.stdout
    assert not (tmp_path / "out").exists()


# -- looking -------------------------------------------------------------------------------------------------------------


def test_models_versions_and_tensors_are_shown(
    service: RunningService, imported: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    shown = as_json(weighbridge(service, "show", f"{MODEL}@latest", "--tensors"))
    assert shown["version"] == imported
    assert {t["name"]: t["shape"] for t in shown["tensors"]} == {n: list(t.shape) for n, t in weights.items()}
    assert shown["model"] in as_json(weighbridge(service, "models"))
    assert {**imported, "refs": ["latest", "live"]} in as_json(weighbridge(service, "versions", MODEL))

    models = weighbridge(service, "models", json=False).stdout.splitlines()
    assert models[0].split() == ["MODEL", "TYPE", "DTYPE", "TENSORS", "SIZE", "REFS"]
    (row,) = (line.split() for line in models if line.startswith(f"{MODEL} "))
    assert row[1:4] == ["llama", "F32", str(len(weights))]
    versions = weighbridge(service, "versions", MODEL, json=False).stdout.splitlines()
    assert versions[-1].split()[:4] == ["1", "durable", "4", "import"]
    text = weighbridge(service, "show", MODEL, "--tensors", json=False).stdout
    assert "version:  1, durable" in text
    assert "lm_head.weight" in text


def test_failed_versions_are_listed_when_asked_for(service: RunningService, hf_dir: Path) -> None:
    as_json(weighbridge(service, "import", hf_dir, "acme/failing"))
    changed = tiny_model(tiny_config("llama", tied=False, intermediate_size=128), seed=1)
    folder = hf_dir.parent / "changed-shape"
    changed.save_pretrained(folder)
    error = error_of(weighbridge(service, "push", folder, "acme/failing", "--step", 1))
    assert error["reason"] == "LAYOUT_INVALID"
    assert any("down_proj.weight is [64, 128]" in line for line in error["details"]), error
    everything = as_json(weighbridge(service, "versions", "acme/failing", "--all"))
    assert [v["number"] for v in everything] == [1], "a folder that is wrong takes no number"
    spec = TensorSpec("lm_head.weight", dtypes.parse("fp32"), (1, 1))
    layout = Layout.stream([spec], [Shard(spec.name, Box.whole(spec.shape))])
    with TrainerClient(service.address) as trainer, pytest.raises(LayoutError):
        trainer.push_shards(
            "acme/failing", layout, TensorSpace.HUGGING_FACE, NotSelected(), step=1, rank=0, world_size=1
        ).wait(timeout=60)
    assert [v["number"] for v in as_json(weighbridge(service, "versions", "acme/failing"))] == [1]
    everything = as_json(weighbridge(service, "versions", "acme/failing", "--all"))
    assert [(v["number"], v["state"]) for v in everything] == [(2, "failed"), (1, "durable")]
    assert "2        failed" in weighbridge(service, "versions", "acme/failing", "--all", json=False).stdout


def test_a_push_that_breaks_is_given_up_at_once(
    service: RunningService, hf_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_json(weighbridge(service, "import", hf_dir, "acme/broken"))

    def broken(*args: object) -> None:
        raise DataLoss("the stream is broken")

    monkeypatch.setattr(RankStream, "_stream", broken)
    error = error_of(weighbridge(service, "push", hf_dir, "acme/broken", "--step", 1))
    assert error["message"] == "the stream is broken"
    newest = as_json(weighbridge(service, "versions", "acme/broken", "--all"))[0]
    assert (newest["number"], newest["state"]) == (2, "aborted")


def test_a_model_without_versions_can_be_shown(service: RunningService, hf_dir: Path) -> None:
    with TrainerClient(service.address) as client:
        client.register_model("acme/empty", hf_dir)
    assert as_json(weighbridge(service, "show", "acme/empty"))["version"] is None
    assert "none yet" in weighbridge(service, "show", "acme/empty", json=False).stdout
    assert "no version yet" in error_of(weighbridge(service, "show", "acme/empty", "--tensors"))["message"]


def test_tags_are_set_and_taken_away(service: RunningService, hf_dir: Path) -> None:
    for _ in range(2):
        as_json(weighbridge(service, "import", hf_dir, "acme/tagged"))
    tagged = as_json(weighbridge(service, "tag", "acme/tagged@1", "prod"))
    assert (tagged["model"], tagged["ref"], tagged["number"]) == ("acme/tagged", "prod", 1)
    assert tagged["state"] == tagged["request"]["state"] == "done"
    assert as_json(weighbridge(service, "show", "acme/tagged@prod"))["version"]["number"] == 1
    error = error_of(weighbridge(service, "tag", "acme/tagged@2", "prod", "--delete"))
    assert "names version 1, not 2" in error["message"]
    result = weighbridge(service, "tag", "acme/tagged@1", "prod", "--delete", json=False)
    assert result.stdout == "acme/tagged: prod was deleted\n"
    assert "prod" not in as_json(weighbridge(service, "show", "acme/tagged"))["model"]["refs"]
    result = weighbridge(service, "tag", "acme/tagged@latest", "best", json=False)
    assert result.stdout == "acme/tagged: best names version 2\n"
    as_json(weighbridge(service, "tag", "acme/tagged", "best", "--delete"))


def test_watch_prints_a_line_a_version(service: RunningService, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_json(weighbridge(service, "import", hf_dir, "acme/watched"))
    results: list[Result] = []
    told: list[int] = []
    really = looking.print_result

    def print_result(found: Any, *said: Any, **options: Any) -> None:
        really(found, *said, **options)
        told.append(found.number)

    monkeypatch.setattr(looking, "print_result", print_result)
    watching = threading.Thread(
        target=lambda: results.append(weighbridge(service, "watch", "acme/watched", "--ref", "latest", "--count", 2))
    )
    watching.start()
    eventually(lambda: told == [1])
    with TrainerClient(service.address) as client:
        client.push_folder("acme/watched", hf_dir, step=2).wait(timeout=60)
    watching.join(timeout=60)
    lines = [json.loads(line) for line in results[0].stdout.splitlines()]
    assert [(v["number"], v["step"]) for v in lines] == [(1, 0), (2, 2)]


def test_verify_finds_one_flipped_byte(service: RunningService, store: Path, hf_dir: Path) -> None:
    as_json(weighbridge(service, "import", hf_dir, "acme/verified"))
    report = as_json(weighbridge(service, "verify", "acme/verified"))
    assert report["ok"]
    assert report["tensors_checked"] == 39
    path = store / "models/acme/verified/versions/000000000001/model.safetensors"
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)
    result = weighbridge(service, "verify", "acme/verified@1")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    with EngineClient(service.address) as client:
        last = list(client.pull("acme/verified", 1).layout.tensors)[-1]
    assert any(last in problem for problem in report["problems"])
    plain = weighbridge(service, "verify", "acme/verified@1", json=False)
    assert plain.exit_code == 1
    assert "3 problems" in plain.stdout


def test_verify_all_compares_each_stored_version_and_goes_on_where_it_was_interrupted(
    service: RunningService, store: Path, hf_dir: Path, tmp_path: Path
) -> None:
    for step in range(3):
        as_json(weighbridge(service, "import" if not step else "push", hf_dir, "acme/all", "--step", str(step)))
    path = store / "models/acme/all/versions/000000000002/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.unlink()
    path.write_bytes(content)
    resume = tmp_path / "resume"
    with EngineClient(service.address) as client:
        newest = client.version("acme/all", 3)
    resume.write_text(json.dumps(["acme/all", 3, newest.create_time_ms]) + "\n")
    result = weighbridge(service, "verify", "acme/all", "--all", "--resume", str(resume))
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [(each["number"], each["ok"]) for each in report["versions"]] == [(2, False), (1, True)]
    assert report["verified_before"] == 1
    assert not resume.exists()
    plain = weighbridge(service, "verify", "acme/all", "--all", json=False)
    assert plain.stdout.splitlines()[-1] == "acme/all: 1 version of 3 damaged (3 versions compared)"
    assert weighbridge(service, "verify", "acme/all@1", "--all").exit_code == 2
