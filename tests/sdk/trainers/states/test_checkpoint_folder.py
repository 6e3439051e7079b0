"""Is a checkpoint taken in as it lies on disk, and one that is not whole refused before anything is pushed?"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from weighbridge._trainers.states.checkpoints import checkpoint_folder
from weighbridge._trainers.states.checkpoints.checkpoint_folder import CheckpointFolder
from weighbridge._trainers.states.checkpoints.checkpoint_values import opened
from weighbridge._trainers.states.training_state import read_blob
from weighbridge._trainers.torch_dist.folder import lay_out_torch_dist
from weighbridge._trainers.torch_dist.writing import write_torch_dist
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound, WeighbridgeError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "_extra_state": [1, "x"]},
    "optimizer": {
        "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4), "count": 5}},
        "param_groups": [{"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99)}],
    },
    "scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2]},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000012"
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return folder


def read(folder: Path) -> tuple[dict[str, bytes], Any]:
    """The bytes of each tensor that would be pushed, and the values."""
    found = CheckpointFolder.read(folder)
    source = found.shards.select(range(len(found.layout.placements)), found.layout)
    stream = source.stage([(0, found.layout.nbytes)])
    shards = {
        place.shard.tensor: bytes(stream.read(place.offset, place.offset + place.nbytes))
        for place in found.layout.placements
    }
    blob = shards.pop("rank_state.00000")
    values = read_blob(torch.frombuffer(bytearray(blob), dtype=torch.uint8), "blob")
    return shards, opened(values, "tests/tiny:training@1")


def test_tensors_are_the_bytes_that_torch_saved_and_values_are_what_they_were(saved: Path) -> None:
    tensors, values = read(saved)
    assert tensors == {
        "model.w": STATE["model"]["w"].numpy().tobytes(),  # type: ignore[attr-defined]
        "optimizer.state.w.step": torch.tensor(3.0).numpy().tobytes(),
        "optimizer.state.w.exp_avg": torch.ones(3, 4).numpy().tobytes(),
    }
    assert values.trainer == {
        "model": {"_extra_state": [1, "x"]},
        "optimizer": {
            "state": {"w": {("count",): 5}},
            "param_groups": STATE["optimizer"]["param_groups"],
        },
    }
    assert dict(values.state) == {"scheduler": STATE["scheduler"]}
    found = CheckpointFolder.read(saved)
    assert (found.format, found.step) == ("dcp", 12)


def test_prefixes_of_chained_optimizers_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    names = ("chained_0.optimizer.state.exp_avg.w", "chained_1.optimizer.state.exp_avg.v")
    dcp.save({name: torch.ones(2) for name in (*names, "w", "v")}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text("{}")
    tensors = {place.shard.tensor for place in CheckpointFolder.read(folder).layout.placements}
    assert tensors == {"optimizer.state.exp_avg.w", "optimizer.state.exp_avg.v", "w", "v", "rank_state.00000"}
    twice = {names[0]: torch.ones(2), names[0].replace("0", "1"): torch.ones(2)}
    dcp.save(twice, checkpoint_id=tmp_path / "twice", no_dist=True)
    with pytest.raises(LayoutError) as refused:
        CheckpointFolder.read(tmp_path / "twice")
    assert refused.value.details == ("optimizer.state.exp_avg.w",)


def test_names_of_blobs_are_taken(tmp_path: Path) -> None:
    dcp.save(
        {"rank_state": {"0": torch.ones(2)}, "w": torch.ones(2)},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    with pytest.raises(LayoutError, match="a name") as refused:
        CheckpointFolder.read(tmp_path / "saved")
    assert refused.value.details == ("rank_state.0",)


def _cut_short(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def _change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _without_chunk(folder: Path) -> None:
    _change_metadata(folder, lambda metadata: metadata.state_dict_metadata["model.w"].chunks.clear())


def _without_place(folder: Path) -> None:
    def change(metadata: Any) -> None:
        key = next(each for each in metadata.storage_data if each.fqn == "scheduler.last_epoch")
        del metadata.storage_data[key]

    _change_metadata(folder, change)


def _without_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def _without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.parametrize(
    ("break_it", "error", "said"),
    [
        (_cut_short, DataLoss, "__0_0.distcp"),
        (_without_chunk, LayoutError, "every part"),
        (_without_place, DataLoss, "scheduler.last_epoch"),
        (_without_file, NotFound, "__0_0.distcp"),
        (_without_metadata, NotFound, ".metadata"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    saved: Path, break_it: Callable[[Path], None], error: type[WeighbridgeError], said: str
) -> None:
    break_it(saved)
    with pytest.raises(error, match=said):
        CheckpointFolder.read(saved)


def test_values_that_are_too_large_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "MAX_VALUES_BYTES", 1000)
    with pytest.raises(InvalidArgument, match="more than 1000"):
        CheckpointFolder.read(saved)


def test_values_that_would_run_code_are_kept_and_not_opened(tmp_path: Path) -> None:
    from weighbridge._core import dtypes
    from weighbridge._core.boxes import Box
    from weighbridge._core.layouts import Shard, TensorSpec

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harmed",))

    folder = tmp_path / "saved"
    folder.mkdir()
    spec = TensorSpec("w", dtypes.parse("fp32"), (2,))
    harmful = pickle.dumps(Harmful())
    files = lay_out_torch_dist(
        [Shard("w", Box.whole((2,)))], [spec], common=harmful, objects={"rng/shard_0_1": harmful}
    )
    write_torch_dist(folder, files, [memoryview(bytes(8))])
    with pytest.raises(DataLoss, match="weights_only"):
        read(folder)
    assert not (tmp_path / "harmed").exists()


# -- what no restore takes -------------------------------------------------------------------------------------------------


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)


def _trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], *, flat: bool = False) -> dict[str, Any]:
    """Module and optimizer after a step, by the names of a module that is wrapped."""
    torch.manual_seed(0)
    net = _Net()
    wrapped, optimizer = wrap(net), torch.optim.AdamW(net.parameters(), 0.1)
    for each in net.parameters():  # a compiled module would be compiled if it were run
        each.grad = torch.ones_like(each)
    optimizer.step()
    named = dict(wrapped.named_parameters())
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = {name: dict(optimizer.state[each]) for name, each in named.items()}
    if flat:  # as flatten_optimizer_state_dict has it
        of_optimizer: dict[str, Any] = {
            f"state.{name}.{key}": value for name, found in state.items() for key, value in found.items()
        } | {f"param_groups.{name}.{key}": value for name in named for key, value in options.items()}
    else:
        of_optimizer = {"state": state, "param_groups": [{**options, "params": list(named)}]}
    return {"model": wrapped.state_dict(), "optimizer": of_optimizer}


def _partly(net: torch.nn.Module) -> torch.nn.Module:
    net.one = torch.compile(net.one)  # type: ignore[arg-type, call-overload]
    return net


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "wrap",
    [torch.compile, _partly, torch.nn.DataParallel, lambda net: torch.compile(torch.nn.DataParallel(net))],
    ids=["compiled", "partly compiled", "of DDP", "both"],
)
def test_a_wrapped_module_is_taken_in_as_the_module_itself(
    tmp_path: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module], flat: bool
) -> None:
    for name, of in (("plain", lambda net: net), ("wrapped", wrap)):
        dcp.save(_trained(of, flat=flat), checkpoint_id=tmp_path / name, no_dist=True)
    assert read(tmp_path / "wrapped") == read(tmp_path / "plain")


def _numbered() -> dict[str, Any]:
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net.two(net.one(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


UNRESTORABLE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "by numbers": (_numbered, "its parameters by number"),
    "by numbers, without state": (
        lambda: {"model": _Net().state_dict(), "optimizer": torch.optim.SGD(_Net().parameters()).state_dict()},
        "its parameters by number",
    ),
    "an optimizer alone": (lambda: {"optimizer": STATE["optimizer"]}, "no module under 'model'"),
    "a module at the top": (lambda: {"w": torch.ones(2)}, "no module under 'model'"),
    "an optimizer of others": (
        lambda: {"model": {"other": torch.ones(2)}, "optimizer": STATE["optimizer"]}, "state of parameters that are not in the module",
    ),
    "an optimizer elsewhere": (
        lambda: {"model": STATE["model"], "optim": STATE["optimizer"]}, "an optimizer under 'optim'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNRESTORABLE)
def test_what_no_restore_takes_is_refused_when_it_is_taken_in(tmp_path: Path, what: str) -> None:
    state, message = UNRESTORABLE[what]
    dcp.save(state(), checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(InvalidArgument, match=message) as refused:
        CheckpointFolder.read(tmp_path / "saved")
    assert "get_state_dict" in refused.value.fix


@pytest.mark.parametrize("chained", ["", "chained_0."])
def test_a_distributed_optimizer_that_is_kept_by_buffers_is_refused(tmp_path: Path, chained: str) -> None:
    """Keys as megatron-core 0.16.1 has them."""
    of_bucket = "gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.exp_avg"
    entries = {
        "embedding.word_embeddings.weight": torch.ones(2),
        f"{chained}optimizer.distributed.dp_group_idx_0.{of_bucket}": torch.ones(2),
    }
    folder = tmp_path / "iter_0000002"
    dcp.save(entries, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="stored by the buffers of the ranks") as refused:
        CheckpointFolder.read(folder)
    assert "--dist-ckpt-optim-fully-reshardable" in refused.value.fix


def test_an_optimizer_of_megatron_alone_is_refused(tmp_path: Path) -> None:
    dcp.save({"optimizer.state.exp_avg.w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    (tmp_path / "saved/metadata.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="does not contain the weights of a model"):
        CheckpointFolder.read(tmp_path / "saved")


def test_parts_of_a_checkpoint_are_not_taken_for_iterations(tmp_path: Path) -> None:
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / part, no_dist=True)
    with pytest.raises(NotFound) as refused:
        CheckpointFolder.read(tmp_path)
    assert "the folder of one checkpoint, such as optimizer_0, pytorch_model_fsdp_0" in refused.value.fix
