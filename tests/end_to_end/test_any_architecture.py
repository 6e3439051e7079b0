"""Models of types without a weight map -> service -> transformers: is every bit where it was?

They are registered by the headers of their files, or by what ranks hold; no family is asked for. transformers is the
independent answer: what it loads from a pulled folder has to be what was saved, tied copies among it. One gloo job
trains all types one after the other, for its start takes longer than they do.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill, run_ranks
from tests.support.unmapped_models import UNMAPPED, auto_class, loaded_by_transformers, unmapped_model
from weighbridge import Boxes, EngineClient, PushHandle, TrainerClient
from weighbridge._cli import commands
from weighbridge.integrations.transformers import from_weighbridge, update
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.families import model_types
from weighbridge_service.models.bridges import made_by
from weighbridge_service.server import HttpServer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    def no_bridges(_config: bytes, _absent: object) -> Any:
        raise AssertionError("a family was asked for")

    folder = tmp_path_factory.mktemp("store")
    with (
        made_by(no_bridges),
        running_service(folder, local_socket=str(folder / "lane.sock")) as running,
    ):
        yield running


def test_none_of_these_types_has_a_map() -> None:
    assert len(UNMAPPED) >= 20
    assert UNMAPPED.keys().isdisjoint(model_types())


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
    assert not different
    assert [found[key].dtype for key in expected] == [tensor.dtype for tensor in expected.values()]


@pytest.mark.parametrize("model_type", UNMAPPED)
def test_a_folder_of_any_type_comes_back_as_transformers_saved_it(
    service: RunningService, tmp_path: Path, model_type: str
) -> None:
    model = unmapped_model(model_type)
    model.save_pretrained(tmp_path / "saved")
    name = f"folders/{model_type}"
    other = unmapped_model(model_type, seed=1)
    other.save_pretrained(tmp_path / "other")
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        version = trainer.import_folder(name, tmp_path / "saved").wait(timeout=60)
        registered = trainer.model(name)
        assert (registered.model_type, registered.weight_map) == (model_type, False)
        engine.export(name, version.number, tmp_path / "pulled")
        pulled = dict(engine.pull(name, version.number))
        first = max(pulled, key=lambda key: pulled[key].numel())
        shape = pulled[first].shape
        rest = Boxes([(first, [1, *(0 for _ in shape[1:])], [shape[0] - 1, *shape[1:]])])
        assert torch.equal(dict(engine.pull(name, version.number, rest))[first], pulled[first][1:])
        # and by an engine's plug-in, which records the slices that a model's own loader takes, and updates it in place
        live = from_weighbridge(f"{name}@{version.number}", engine, model_class=auto_class(model_type))
        assert_same(live.state_dict(), model.state_dict())
        update(live, trainer.push_folder(name, tmp_path / "other").wait(timeout=60).number)
        assert_same(live.state_dict(), other.state_dict())
    expected = model.state_dict()
    assert_same(loaded_by_transformers(model_type, tmp_path / "pulled"), expected)
    assert_same(pulled, {key: expected[key] for key in pulled})
    # each tensor once: tied copies are in no file
    assert registered.tensor_count == len(pulled) == len({t.data_ptr() for t in expected.values()})


def _rank(_rank: int, address: str, folder: str) -> list[int]:
    """Register each model as a trainer with sharded ranks does, push, change every weight, and restore."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    pushed: dict[str, tuple[Any, dict[str, Tensor], PushHandle]] = {}
    numbers = []
    with TrainerClient(address) as trainer:
        for model_type in UNMAPPED:
            model: Any = unmapped_model(model_type)
            scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
            fully_shard(model, mesh=mesh, ignored_params=scalars)  # FSDP2 does not shard these
            name = f"ranks/{model_type}"
            registered = trainer.register_model(name, Path(folder) / model_type, tensors=model)
            assert not registered.weight_map
            handle = trainer.push_state_dict(name, model, step=1)
            before = {key: _local(tensor).clone() for key, tensor in model.state_dict().items()}
            fill(model.state_dict().values(), 7)
            pushed[model_type] = model, before, handle
        for model_type, (model, before, handle) in pushed.items():
            version = handle.wait(timeout=60)
            assert trainer.restore_state_dict(f"ranks/{model_type}", model, version=version.number) == version
            after = model.state_dict()
            assert all(torch.equal(_local(after[key]), tensor) for key, tensor in before.items()), model_type
            numbers.append(version.number)
    return numbers


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def test_ranks_register_push_and_restore_any_type_by_what_they_hold(service: RunningService, tmp_path: Path) -> None:
    for model_type in UNMAPPED:
        unmapped_model(model_type).config.save_pretrained(tmp_path / model_type)
    results = run_ranks(2, _rank, service.address, str(tmp_path))
    assert results[0] == results[1] == [1] * len(UNMAPPED)
    with EngineClient(service.address) as engine:
        for model_type in UNMAPPED:
            engine.export(f"ranks/{model_type}", 1, tmp_path / "pulled" / model_type)
            expected = unmapped_model(model_type).state_dict()
            assert_same(loaded_by_transformers(model_type, tmp_path / "pulled" / model_type), expected)


def test_a_model_without_a_map_is_marked_and_served_to_the_tools_of_the_hub_and_of_the_shell(
    service: RunningService, tmp_path: Path
) -> None:
    model = unmapped_model("mamba")
    model.save_pretrained(tmp_path / "saved")
    exports = Exports(service.service)
    server = HttpServer("127.0.0.1:0", 64)
    server.start(create_app(service.service, exports, service.metrics, service.health))

    def fetched(path: str) -> bytes:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=30) as response:
            content: bytes = response.read()
        return content

    try:
        run = CliRunner()
        at = ["--server", service.address]
        imported = run.invoke(commands, ["import", str(tmp_path / "saved"), "shell/mamba", *at])
        assert imported.exit_code == 0, imported.output
        again = run.invoke(commands, ["import", str(tmp_path / "saved"), "shell/mamba", "--no-weight-map", *at])
        assert again.exit_code == 0, again.output
        for command in (["models"], ["show", "shell/mamba"]):
            assert "mamba (no weight map)" in run.invoke(commands, [*command, *at]).output
        shown = json.loads(run.invoke(commands, ["show", "shell/mamba", "--json", *at]).stdout)
        assert shown["model"]["weight_map"] is False
        assert json.loads(fetched("/v1/models/shell/mamba"))["weight_map"] is False
        assert run.invoke(commands, ["tag", "shell/mamba@1", "prod", *at]).exit_code == 0
        assert run.invoke(commands, ["verify", "shell/mamba@prod", *at]).exit_code == 0
        out = tmp_path / "pulled"
        pulled = run.invoke(commands, ["pull", "shell/mamba@prod", "--out", str(out), *at])
        assert pulled.exit_code == 0, pulled.output
        refused = run.invoke(
            commands,
            ["pull", "shell/mamba@1", "--out", str(tmp_path / "r"), "--tp-size", "2", "--tp-rank", "0", *at],
        )
        assert refused.exit_code == 1
        assert "no weight map for the model type 'mamba'" in refused.output
        converted = run.invoke(commands, ["convert", str(tmp_path / "saved"), str(tmp_path / "c")])
        assert converted.exit_code == 1
        assert "no weight map for the model type 'mamba'" in converted.output
        hub = tmp_path / "hub"
        hub.mkdir()
        for file in ("config.json", "model.safetensors"):
            (hub / file).write_bytes(fetched(f"/shell/mamba/resolve/prod/{file}"))
    finally:
        server.stop()
        exports.close()
    for folder in (out, hub):
        assert_same(loaded_by_transformers("mamba", folder), model.state_dict())
