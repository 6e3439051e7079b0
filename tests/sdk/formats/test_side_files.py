"""Does a folder give all files of its model and no others, and a name and a reason for each file that is left out?"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from huggingface_hub.file_download import _create_symlink

from tests.support.executed_lines import executed_lines
from weighbridge._formats.safetensors_files import map_file
from weighbridge._formats.side_files.carried import carried_files
from weighbridge._formats.side_files.choice import FoundFile, choose
from weighbridge._formats.side_files.reading import SideFiles
from weighbridge._trainers.torch_dist.folder import open_file
from weighbridge.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted

OF_A_MODEL = [
    "config.json", "generation_config.json", "model.py", "LICENSE", "NOTICE", "README.md", "merges.txt", "vocab.bpe", "bpe.codes",
    "source.spm", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "chat_template.jinja", "quantize.yaml", "recipe.toml",
    "additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "assets/figures/loss.png", "scheduler/scheduler_config.json",
]  # fmt: skip
OF_NONE = {
    "pytorch_model.bin": "weights", "pytorch_model.bin.index.json": "weights", "flax_model.msgpack": "weights", "model.gguf": "weights",
    "optimizer.pt": "trainer", "trainer_state.json": "trainer", "training_args.bin": "trainer", "rng_state_0.pth": "trainer",
    "wandb/": "trainer", "onnx/": "weights of its own", "checkpoint-500/": "weights of its own", "a name.txt": "not a valid file name", "a/b c/d.txt": "not a valid file name",
}  # fmt: skip
"""Files that are left out, with a part of each reason."""
BESIDE = [
    *(name for name in OF_NONE if not name.endswith("/")),
    *("wandb/run-1/files/output.log", "onnx/model.onnx", "onnx/config.json", "checkpoint-500/model.safetensors", "checkpoint-500/tokenizer/tokenizer.json"),
]  # fmt: skip
OWN = [
    "model.safetensors",
    "model.safetensors.index.json",
    "weighbridge.json",
    "model.safetensors.blake3",
    "signatures/a.sig",
]


def _found(*names: str, nbytes: int = 1) -> list[FoundFile]:
    return [FoundFile(name, nbytes) for name in names]


def _write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_everything_is_taken_but_weights_and_what_a_trainer_keeps() -> None:
    chosen = choose(_found(*OF_A_MODEL, *BESIDE, *OWN))
    assert chosen.taken == tuple(sorted(OF_A_MODEL))
    assert chosen.left_out.keys() == OF_NONE.keys()
    assert all(OF_NONE[name] in reason for name, reason in chosen.left_out.items())


def test_files_that_loaders_ask_for_are_taken_before_smaller_ones_that_none_does() -> None:
    files = [FoundFile("tokenizer.json", 60), FoundFile("film.mp4", 50), FoundFile("a.png", 30), FoundFile("b.png", 20)]
    chosen = choose(files, most_bytes=100)
    assert chosen.taken == ("b.png", "tokenizer.json")
    assert list(chosen.left_out) == ["a.png", "film.mp4"]
    assert "30 B" in chosen.left_out["a.png"]
    # what is needed is for the registration to refuse
    assert choose([FoundFile("tokenizer.json", 200)], most_bytes=100).taken == ("tokenizer.json",)


def test_a_folder_is_read_with_its_folders_and_without_hidden_files(tmp_path: Path) -> None:
    _write(tmp_path, *OF_A_MODEL, *BESIDE, ".gitattributes", ".cache/x.json", "__pycache__/model.pyc")
    (tmp_path / "empty").mkdir()
    read = SideFiles.read(tmp_path)
    assert read.files == {name: name.encode() for name in OF_A_MODEL}
    assert read.left_out.keys() == OF_NONE.keys()
    assert list(read.kinds().values()) == [len(OF_NONE)]


def test_files_that_fit_in_no_memory_are_refused_by_name_and_not_read(tmp_path: Path) -> None:
    _write(tmp_path, "config.json", "big.json")
    os.truncate(tmp_path / "big.json", 1 << 40)
    with pytest.raises(InvalidArgument, match=r"big\.json has 1.1 TB"):
        SideFiles.read(tmp_path)


def test_more_files_are_open_at_once_than_a_process_usually_may(tmp_path: Path) -> None:
    _write(tmp_path, *(name := [f"{number}.distcp" for number in range(64)]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = len(os.listdir("/proc/self/fd")) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
    try:
        files = [map_file(tmp_path, each) for each in name]
        assert [bytes(file[:2]) for file in files] == [each[:2].encode() for each in name]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_cannot_be_opened_beside_so_many_is_said_to_be_one_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    _write(tmp_path, "0.distcp")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResourceExhausted, match="Too many open files"):
        map_file(tmp_path, "0.distcp")


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "config.json", "sub/a.json")
    listed = os.scandir

    def scandir(folder: Path) -> object:
        if folder == tmp_path / "sub":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)  # the user of the tests may be allowed to read everything
    with pytest.raises(InvalidArgument, match="sub cannot be read: Permission denied"):
        SideFiles.read(tmp_path)


def test_the_work_of_a_choice_among_many_folders_grows_with_their_number_alone() -> None:
    def lines(count: int) -> int:
        found = [FoundFile(f"{number}/{name}", 1) for number in range(count) for name in ("a.bin", "a.json")]
        assert len(choose(found).left_out) == count
        return executed_lines(lambda: choose(found))

    assert lines(800) < 4.5 * lines(200)


def test_a_snapshot_in_a_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    repo = tmp_path / "hub/models--acme--smol"
    folder = repo / "snapshots" / ("0" * 40)
    for number, name in enumerate(("config.json", "1_Pooling/config.json", "model.safetensors")):
        blob = _write(repo, f"blobs/{number}") / f"blobs/{number}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _create_symlink(str(blob), str(folder / name))  # as hf_hub_download does
    assert (folder / "config.json").is_symlink()
    read = SideFiles.read(folder)
    assert read.files == {"config.json": b"blobs/0", "1_Pooling/config.json": b"blobs/1"}
    assert map_file(folder, "model.safetensors")[0:7].tobytes() == b"blobs/2"
    assert SideFiles.read(folder / "1_Pooling").files == {"config.json": b"blobs/1"}
    # a folder that only claims to be such a cache
    (repo / "blobs/0").unlink()
    (repo / "blobs/0").symlink_to("/etc/hostname")
    with pytest.raises(InvalidArgument, match="outside its folder"):
        SideFiles.read(folder)


def test_links_are_followed_within_the_folder_alone_and_devices_are_not_opened(tmp_path: Path) -> None:
    secret = _write(tmp_path / "home", "secret.json") / "secret.json"
    folder = _write(tmp_path / "hf", "config.json", "..2026/vocab.json")
    (folder / "vocab.json").symlink_to("..2026/vocab.json")  # as Kubernetes mounts a ConfigMap
    (folder / "notes.json").symlink_to("../home/secret.json")
    (folder / "more").symlink_to("../home")
    (folder / "gone.json").symlink_to("nowhere")
    (folder / "log.json").symlink_to("/dev/zero")
    (folder / "round.json").symlink_to("round.json")
    os.mkfifo(folder / "pipe.json")
    read = SideFiles.read(folder)
    assert read.files == {"config.json": b"config.json", "vocab.json": b"..2026/vocab.json"}
    assert read.left_out == {
        "notes.json": "it is a link out of the folder", "more": "it is a link to a folder", "gone.json": "it is a dangling link",
        "log.json": "it is not a regular file", "round.json": "it is not a regular file", "pipe.json": "it is not a regular file",
    }  # fmt: skip
    for name, error in (("notes.json", InvalidArgument), ("log.json", DataLoss), ("gone.json", NotFound)):
        with pytest.raises(error, match=name):
            map_file(folder, name)
    with pytest.raises(InvalidArgument, match="outside its folder"), open_file(folder, "notes.json"):
        pass
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(secret)
    with pytest.raises(InvalidArgument, match=r"config\.json is a link to .*, outside its folder"):
        SideFiles.read(folder)


def test_a_folder_with_a_config_alone_keeps_the_registered_tokenizer_and_one_with_its_own_replaces_it() -> None:
    registered = dict.fromkeys(
        ("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja", "LICENSE", "model.py"),
        b"old",
    )  # fmt: skip
    assert carried_files(registered, {"config.json": b"new"}) == {**registered, "config.json": b"new"}
    new = {"config.json": b"new", "tokenizer.json": b"new", "special_tokens_map.json": b"new"}
    assert carried_files(registered, new) == {**new, "LICENSE": b"old", "model.py": b"old"}
