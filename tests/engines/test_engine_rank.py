"""Does the engine of docs/engines.md update real ranks from version to version, bit for bit, and all of them or
none?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import engine_ranks
from tests.support.engine_ranks import Parameters
from tests.support.forked import run_jobs
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge.follow.status import Status
from weighbridge_demo.ranks import gloo_job

MODEL, WIDER, DEEPER, EMPTY = "tests/example", "tests/wider", "tests/deeper", "tests/empty"
ROOT = Path(__file__).parents[2]


def config(**overrides: Any) -> Any:
    return tiny_config("llama", tied=False, head_dim=8, **overrides)


def push(service: RunningService, name: str, folder: Path, seed: int, dtype: torch.dtype, **overrides: Any) -> None:
    tiny_model(config(**overrides), seed).to(dtype).save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        if seed == 1:
            trainer.register_model(name, folder)
        trainer.push_folder(name, folder).wait(timeout=60)


@dataclass(frozen=True)
class Place:
    """A service with two versions of a model, the folders that they are of, and one for what engines keep for their
    next start.
    """

    service: RunningService
    folders: list[Path]
    cache: Path

    def run(self, size: int, fn: Callable[..., Any], *args: Any, **overrides: Any) -> list[Any]:
        """The results of a function of `tests.support.engine_ranks` on all ranks."""
        engine = (self.service.address, MODEL, config(**overrides))
        job = gloo_job(size, engine_ranks.run, str(self.cache), fn, *engine, *args)
        return run_jobs([job], timeout=120)[0]

    def cut(self, version: int, rank: int, size: int) -> Parameters:
        """The parameters of a version that a rank must hold, cut from its files."""
        return cut(load_file(self.folders[version - 1] / "model.safetensors"), rank, size)


def cut(tensors: Parameters, rank: int, size: int) -> Parameters:
    def rows(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].chunk(size)[rank]

    found = {
        "model_embed_tokens": rows("model.embed_tokens"),
        "lm_head": rows("lm_head"),
        "model_norm": tensors["model.norm.weight"],
    }
    for layer in (f"model.layers.{n}" for n in range(4)):
        own = layer.replace(".", "_")
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        found[f"{own}_self_attn_qkv"] = torch.cat([rows(f"{attention}.{each}_proj") for each in "qkv"])
        found[f"{own}_mlp_gate_up"] = torch.cat([rows(f"{mlp}.gate_proj"), rows(f"{mlp}.up_proj")])
        for name in (f"{attention}.o_proj", f"{mlp}.down_proj"):
            found[name.replace(".", "_")] = tensors[f"{name}.weight"].chunk(size, dim=1)[rank]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}_{norm}"] = tensors[f"{layer}.{norm}.weight"]
    return found


def check_same(found: Parameters, expected: Parameters) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with running_service(tmp_path_factory.mktemp("store")) as service:
        folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
        for seed, folder in enumerate(folders, 1):
            push(service, MODEL, folder, seed, torch.float32)
        push(service, WIDER, tmp_path_factory.mktemp("wider"), 1, torch.float32, intermediate_size=128)
        push(service, DEEPER, tmp_path_factory.mktemp("deeper"), 1, torch.float32, num_hidden_layers=5)
        with TrainerClient(service.address) as trainer:
            trainer.register_model(EMPTY, folders[0])
        yield Place(service, folders, tmp_path_factory.mktemp("cache"))


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_holds_the_bits_of_its_part_of_the_files_and_fetches_no_more(place: Place, size: int) -> None:
    for rank, found in enumerate(place.run(size, engine_ranks.go_to_versions)):
        for version, parameters in zip((1, 2, 1, 2), found["parameters"], strict=True):
            check_same(parameters, place.cut(version, rank, size))
        for version, parameters in zip((1, 2), found["kept"], strict=True):
            check_same(parameters, place.cut(version, rank, size))  # while the next one was being prepared
        held = sum(p.nbytes for p in found["parameters"][0].values())
        assert found["nbytes"] == held
        for served, prepared, status in zip((1, 2), (2, 1), found["statuses"], strict=True):
            assert (status.served, status.prepared) == (f"{MODEL}@{served}", f"{MODEL}@{prepared}")
            assert (status.preparing, status.error, status.broken, status.nbytes) == ("", "", "", held)
            assert status.seconds > 0
        assert found["status"] == found["discarded"] == Status(served=f"{MODEL}@2")
        assert found["in place"]


def test_versions_come_by_a_staging_place_which_one_that_was_discarded_does_not_disturb(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.go_by_a_staging_place)):
        for version, parameters in zip((1, 2, 1), found["parameters"], strict=True):
            check_same(parameters, place.cut(version, rank, 2))
        for version, parameters in zip((1, 2), found["kept"], strict=True):
            check_same(parameters, place.cut(version, rank, 2))


def test_an_engine_that_was_loaded_from_files_is_updated(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.update_an_engine_of_files, EMPTY)):
        assert "does not know which model it serves" in found["unknown"]
        assert f"{EMPTY}@1" in found["absent"] or f"{EMPTY} has no version" in found["absent"]
        check_same(found["parameters"], place.cut(2, rank, 2))
        assert found["status"].served == f"{MODEL}@2"


def test_no_rank_goes_if_one_cannot_get_its_bytes(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.lose_the_service)):
        lost, missing = found["said"]
        assert "version 2 was not prepared, and the engine keeps version 1" in lost
        assert "rank 1: " in lost
        assert "127.0.0.1:9" in lost
        assert "rank 0: " not in lost
        assert "version 1000 was not prepared" in missing
        assert "all ranks: " in missing
        check_same(found["kept"], place.cut(1, rank, 2))
        assert found["status"] == Status(served=f"{MODEL}@1")
        check_same(found["parameters"], place.cut(2, rank, 2))


def test_all_ranks_go_back_if_one_fails_while_it_fills(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.fail_while_filling)):
        once, twice = found["said"]
        assert "version 2 could not be applied; the engine is back at version 1" in once
        assert "rank 1: RuntimeError: made up" in once
        check_same(found["kept"][0], place.cut(1, rank, 2))
        assert found["statuses"][0] == Status(served=f"{MODEL}@1")
        assert "version 2 was applied in part, and the engine serves no version" in twice
        assert found["statuses"][1].served == ""
        assert "version 1 could not be restored" in found["statuses"][1].broken
        check_same(found["parameters"], place.cut(2, rank, 2))
        assert found["status"] == Status(served=f"{MODEL}@2")


def test_all_ranks_take_a_version_back_that_another_engine_could_not_take(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.take_a_version_back)):
        assert (found["staged"].served, found["staged"].prepared) == (f"{MODEL}@1", f"{MODEL}@2")
        check_same(found["back"], place.cut(1, rank, 2))
        assert found["status"] == Status(served=f"{MODEL}@1")
        assert "version 1 was not prepared, and the engine keeps version 2" in found["said"]
        check_same(found["kept"], place.cut(2, rank, 2))


@pytest.mark.parametrize("level", [1, 2])
def test_a_version_that_comes_while_the_engine_sleeps_is_brought_by_its_wake_up(place: Place, level: int) -> None:
    """Level 1 keeps the parameters' values, level 2 does not."""
    one, two = f"{MODEL}@1", f"{MODEL}@2"
    for rank, found in enumerate(place.run(2, engine_ranks.sleep_and_wake, level)):
        assert "version 2 was not applied, and the engine keeps version 1" in found["refused"]
        assert "rank 1: the engine sleeps" in found["refused"]
        assert (found["before"].served, found["before"].waiting) == (one, "")

        said, kept, status, owes = found["woken"]  # versions do not wait yet, and nothing is brought back
        assert (said, owes) == ("", False)
        if level == 1:
            check_same(kept, place.cut(1, rank, 2))
            assert (status.served, status.broken) == (one, "")
        else:
            assert (status.served, status.broken) == ("", f"{one} was discarded while the engine slept")

        said, kept, status, owes = found["failed"]
        assert "version 2 could not be applied; the engine is back at version 1" in said
        assert status == Status(served=one)
        check_same(kept, place.cut(1, rank, 2))

        said, kept, status, owes = found["same"]
        assert (said, status.served, status.broken, owes) == ("", one, "", False)
        check_same(kept, place.cut(1, rank, 2))

        waits = found["waits"]
        assert (waits.served, waits.waiting, waits.prepared) == (one, two, two)
        assert found["undone"].waiting == ""
        for when in ("first", "last"):
            said, kept, status, owes = found[when]
            assert (said, status.served, status.waiting, owes) == ("", two, "", False)
            assert one in (status.preparing, status.prepared), "what an agent waits for comes all the same"
            check_same(kept, place.cut(2, rank, 2))

        said, kept, status, owes = found["away"]  # version 1 waits; a rank can get neither it nor version 2
        assert "was not prepared, and the engine keeps " + ("version 2" if level == 1 else "no version") in said
        assert (status.served, owes) == ((two, False) if level == 1 else ("", True))
        _, kept, status, owes = found["back"]
        assert (status.served, status.waiting, status.broken, owes) == (two, "", "", False)
        check_same(kept, place.cut(2, rank, 2))


def test_versions_of_other_models_are_refused_before_anything_is_touched(place: Place) -> None:
    ranks = place.run(2, engine_ranks.take_what_does_not_fit, [WIDER, DEEPER])
    for rank, found in enumerate(ranks):
        wider, deeper = found["said"]
        assert all("intermediate_size is 128, and 96 in the engine" in said for said in wider)
        assert all("num_hidden_layers is 5, and 4 in the engine" in said for said in deeper)
        assert "version 1 is not being prepared" in wider[0]
        assert "the engine keeps tests/example@1" in wider[1]
        check_same(found["parameters"], place.cut(2, rank, 2))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"vocab_size": 256}, "vocab_size is 128, and 256"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 4, and 3"),
    ],
)
def test_an_engine_of_another_configuration_does_not_start(place: Place, overrides: dict[str, int], said: str) -> None:
    assert all(said in each for each in place.run(2, engine_ranks.cannot_start, **overrides))


def test_tensors_of_another_dtype_are_recorded_again(place: Place, tmp_path: Path) -> None:
    with running_service(tmp_path / "store") as other:
        push(other, MODEL, tmp_path / "half", 1, torch.bfloat16)
        ranks = place.run(2, engine_ranks.take_another_dtype, other.address)
    tensors = {name: t.float() for name, t in load_file(tmp_path / "half" / "model.safetensors").items()}
    for rank, found in enumerate(ranks):
        check_same(found["other"], cut(tensors, rank, 2))
        check_same(found["parameters"], place.cut(2, rank, 2))


def test_what_was_prepared_for_another_configuration_is_prepared_again(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.change_the_configuration)):
        check_same(found["parameters"], place.cut(2, 1 - rank, 2))


def test_a_version_that_is_on_its_way_to_one_rank_is_not_replaced_on_any(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.prepare_two)):
        assert "rank 0: version 2 is being prepared" in found["said"][0]
        assert found["first"].preparing == (f"{MODEL}@2" if rank == 0 else "")
        check_same(found["parameters"], place.cut(2, rank, 2))


def test_a_parameter_that_lies_otherwise_than_it_did_is_refused_by_name(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.move_a_parameter)):
        assert "rank 1: " in found["said"]
        assert "when it was recorded" in found["said"]
        check_same(found["parameters"], place.cut(1, rank, 2))


def test_ranks_that_are_asked_for_different_versions_keep_what_they_have(place: Place) -> None:
    for rank, found in enumerate(place.run(2, engine_ranks.ask_for_different_versions)):
        assert f"rank 0 was asked for {MODEL}@2\n  - rank 1 was asked for {MODEL}@1" in found["said"]
        assert found["status"] == Status(served=f"{MODEL}@1")
        check_same(found["parameters"], place.cut(1, rank, 2))


def test_the_document_shows_the_engine_that_is_tested() -> None:
    document = (ROOT / "docs" / "engines.md").read_text()
    assert f"```python\n{(ROOT / 'tests' / 'support' / 'example_engine.py').read_text()}```" in document
