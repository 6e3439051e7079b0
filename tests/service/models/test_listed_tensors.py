"""Can models without a weight map be registered, pushed and pulled, and go on when a later release has a map for them?

Lists are stored beside heads.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from tests.support.heads import allocate
from tests.support.held_shards import NotSelected
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import fill
from weighbridge import (
    Boxes,
    EngineClient,
    FullTensors,
    MegatronRank,
    Model,
    TensorParallel,
    TrainerClient,
)
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import request_parts, wire
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, LayoutError
from weighbridge.v1 import resources_pb2
from weighbridge_service import families
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.registration import check_registration, registration_of
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.replicas.takeovers import handed_from_proto, handed_to_proto
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName, tensor_list_key
from weighbridge_storage.stores.local import LocalStore

NAME = ModelName.parse("acme/other")
CONFIG: dict[str, Any] = {"model_type": "gpt2", "n_embd": 4, "dtype": "float16"}
F32, BF16, I64 = (dtypes.parse(name) for name in ("fp32", "bf16", "i64"))
FOUND = [
    TensorSpec("transformer.wte.weight", F32, (6, 4)),
    *(TensorSpec(f"transformer.h.{layer}.mlp.c_fc.weight", F32, (4, 8)) for layer in range(12)),
    TensorSpec("transformer.h.0.attn.bias", dtypes.parse("bool"), (1, 1, 2, 2)),
    TensorSpec("transformer.h.0.counter", I64, ()),
    TensorSpec("transformer.h.0.scale", dtypes.parse("fp8_e4m3"), (2,)),
]


def files(**changes: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps({**CONFIG, **changes}).encode()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(tmp_path / "store")) as store:
        yield store


@pytest.fixture
def catalog(store: LocalStore) -> Catalog:
    return Catalog(store)


def open_version(catalog: Catalog) -> None:
    catalog.heads.update(NAME, lambda head: (allocate(head)[0], None))


def tensors(catalog: Catalog) -> dict[str, TensorSpec]:
    return dict(catalog.model(NAME).tensors)


# -- registering ---------------------------------------------------------------------------------------------------------


def test_without_tensors_it_is_said_how_to_give_them_and_which_types_need_none(catalog: Catalog) -> None:
    with pytest.raises(InvalidArgument, match="no weight map for the model type 'gpt2'") as caught:
        catalog.register_model(str(NAME), files())
    assert "weighbridge import" in caught.value.fix
    assert "tensors=" in caught.value.fix
    assert ", ".join(families.model_types()) in caught.value.details[0]
    assert catalog.list_models() == []


def test_the_same_tensors_in_any_order_are_the_same_model(catalog: Catalog) -> None:
    registered = catalog.register_model(str(NAME), files(), found=FOUND)
    assert registered == Model(
        str(NAME), "gpt2", "F32", len(FOUND), sum(spec.nbytes for spec in FOUND), ("config.json",), {}, False
    )
    layout, identity = catalog.model(NAME).files.layout.digest, catalog.model(NAME).identity
    # layers in the order of their numbers
    names = [name for name in tensors(catalog) if ".mlp." in name]
    assert names == [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in range(12)]
    open_version(catalog)
    for seed in range(3):
        shuffled = random.Random(seed).sample(FOUND, len(FOUND))
        for one in (catalog, Catalog(catalog.store)):
            one.register_model(str(NAME), {**files(), "tokenizer.json": bytes([seed])}, found=shuffled)
            assert one.model(NAME).files.layout.digest == layout
            assert one.model(NAME).identity == identity
            assert one.get_model(str(NAME)).weight_map is False


@pytest.mark.parametrize(
    "found",
    [
        FOUND[1:],
        [*FOUND, TensorSpec("lm_head.weight", F32, (6, 4))],
        [TensorSpec(FOUND[0].name, F32, (4, 6)), *FOUND[1:]],
        [TensorSpec(FOUND[0].name, BF16, (6, 4)), *FOUND[1:]],
    ],
    ids=["fewer", "more", "other shape", "other dtype"],
)
def test_other_tensors_replace_those_of_a_model_without_versions_and_no_others(
    catalog: Catalog, found: list[TensorSpec]
) -> None:
    catalog.register_model(str(NAME), files(), found=FOUND)
    catalog.register_model(str(NAME), files(), found=found)
    assert set(tensors(catalog).values()) == set(found)
    catalog.register_model(str(NAME), files(), found=FOUND)
    open_version(catalog)
    with pytest.raises(FailedPrecondition, match="registered already, with different tensors"):
        catalog.register_model(str(NAME), files(), found=found)
    for one in (catalog, Catalog(catalog.store)):
        assert set(tensors(one).values()) == set(FOUND)


def test_the_config_alone_registers_what_is_registered(catalog: Catalog) -> None:
    """As every rank of a trainer does whose folder has no weights."""
    first = catalog.register_model(str(NAME), files(), found=FOUND)
    for _ in range(2):
        for one in (catalog, Catalog(catalog.store)):
            assert one.register_model(str(NAME), files()) == first
            assert set(tensors(one).values()) == set(FOUND)
        open_version(catalog)
    # but not that of another type, of which nothing is known
    with pytest.raises(InvalidArgument, match="no weight map for the model type 'bert'"):
        catalog.register_model(str(NAME), files(model_type="bert"))


def test_a_dtype_is_that_of_floating_point_numbers_alone(catalog: Catalog) -> None:
    catalog.register_model(str(NAME), files(), "bf16", FOUND)
    expected = {spec.name: BF16 if spec.dtype == F32 else spec.dtype for spec in FOUND}
    assert {name: spec.dtype for name, spec in tensors(catalog).items()} == expected
    assert catalog.get_model(str(NAME)).dtype == "BF16"
    open_version(catalog)
    catalog.register_model(str(NAME), files(), "bf16")
    with pytest.raises(FailedPrecondition, match="registered already"):
        catalog.register_model(str(NAME), files(), "fp16")
    for wrong in ("int8", "fp8_e4m3", "evil"):
        with pytest.raises(InvalidArgument, match=r"dtype|registered in"):
            catalog.register_model(str(NAME), files(), wrong)


@pytest.mark.parametrize("model_type", [None, ""])
def test_a_config_without_a_model_type_is_registered_by_its_tensors(catalog: Catalog, model_type: Any) -> None:
    assert catalog.register_model(str(NAME), files(model_type=model_type), found=FOUND).model_type == ""
    check_registration(NAME, catalog.head(NAME))
    assert set(tensors(Catalog(catalog.store)).values()) == set(FOUND)


@pytest.mark.parametrize("model_type", [5, ["gpt2"], {"a": 1}, "x" * 10_000, "a\nb"], ids=lambda t: str(t)[:8])
def test_a_model_type_that_is_no_text_is_refused_whatever_the_tensors(catalog: Catalog, model_type: Any) -> None:
    with pytest.raises(InvalidArgument, match="no weight map") as caught:
        catalog.register_model(str(NAME), files(model_type=model_type), found=FOUND)
    assert len(str(caught.value)) < 2000
    assert list(catalog.store.list("")) == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([TensorSpec("empty", F32, (0, 4))], "at least one tensor with elements"),
        ([*FOUND, FOUND[3]], "listed more than once"),
        ([*FOUND, TensorSpec(FOUND[3].name, F32, (1,))], "listed more than once"),
    ],
)
def test_lists_that_no_model_has_are_refused(catalog: Catalog, found: list[TensorSpec], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        catalog.register_model(str(NAME), files(), found=found)
    assert list(catalog.store.list("")) == []


def test_a_mapped_model_has_no_list(catalog: Catalog) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 8,
    }  # fmt: skip
    assert catalog.register_model(str(NAME), {"config.json": json.dumps(config).encode()}).weight_map
    assert catalog.head(NAME).registration.keys() == {
        "model_type", "dtype", "dtypes", "absent", "block", "tensor_count", "tensor_bytes", "files", "tensors_digest", "identity",
    }  # fmt: skip
    assert not list(catalog.store.list(f"{NAME.prefix}tensors/"))


def test_a_message_says_whether_a_model_has_a_map(catalog: Catalog) -> None:
    for model in (
        catalog.register_model(str(NAME), files(), found=FOUND),
        Model("a/b", "llama", "F32", 1, 4),
    ):
        assert wire.read(Model, wire.write(resources_pb2.Model, model)) == model


def test_a_list_of_20_000_tensors_leaves_the_head_small(catalog: Catalog) -> None:
    found = [TensorSpec(f"layers.{n // 9}.part.{n % 9}.weight", BF16, (8, 8)) for n in range(20_000)]
    catalog.register_model(str(NAME), files(), found=found)
    assert len(catalog.store.get(NAME.head_key)[0]) < 2000
    assert list(tensors(Catalog(catalog.store)).values()) == found


# -- when there is a map later -------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1,
    "num_key_value_heads": 1, "vocab_size": 8,
}  # fmt: skip


@pytest.fixture
def before_the_map(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, bytes], list[TensorSpec]]:
    """Files and tensors of a model that was registered by a release without a map for llama."""
    content = {"config.json": json.dumps(LLAMA).encode()}
    found = [TensorSpec(name, F32, shape) for name, shape in bridge_for(content["config.json"]).hugging_face.items()]
    there = {name: entry for name, entry in families._registered().items() if name != "llama"}
    with monkeypatch.context() as patch:
        patch.setattr(families, "_registered", lambda: there)
        assert not catalog.register_model(str(NAME), content, found=found).weight_map
    return content, found


def test_a_model_with_versions_goes_on_without_a_map_when_its_type_gets_one(
    catalog: Catalog, before_the_map: tuple[dict[str, bytes], list[TensorSpec]]
) -> None:
    content, found = before_the_map
    before, registered = catalog.model(NAME), catalog.get_model(str(NAME))
    open_version(catalog)
    later = Catalog(catalog.store)
    for again in ((), found):
        assert later.register_model(str(NAME), content, found=again) == registered
        model = later.model(NAME)
        assert (model.files, model.identity, model.kept) == (before.files, before.identity, before.kept)
    with pytest.raises(InvalidArgument, match="registered without a weight map") as caught:
        _ = later.model(NAME).bridge
    assert "under another name: llama has one" in caught.value.fix
    with pytest.raises(FailedPrecondition, match="registered already"):
        later.register_model(str(NAME), content, found=[*found, TensorSpec("further", F32, (1,))])


def test_a_model_without_versions_gets_the_map_with_its_next_registration(
    catalog: Catalog, before_the_map: tuple[dict[str, bytes], list[TensorSpec]]
) -> None:
    content, found = before_the_map
    assert not catalog.register_model(str(NAME), content).weight_map  # a rank may not know the tensors
    assert catalog.register_model(str(NAME), content, found=found).weight_map
    assert catalog.model(NAME).bridge.megatron
    assert set(tensors(Catalog(catalog.store)).values()) == set(found)


def test_a_model_type_with_a_map_can_do_without_it(catalog: Catalog) -> None:
    """As one that is quantised, or has layers of its own."""
    content = {"config.json": json.dumps(LLAMA).encode()}
    with pytest.raises(InvalidArgument, match="the tensors of the model are not known"):
        catalog.register_model(str(NAME), content, weight_map=False)
    with pytest.raises(InvalidArgument, match=r"not what config\.json describes") as caught:
        catalog.register_model(str(NAME), content, found=FOUND)
    assert "--no-weight-map" in caught.value.fix
    registered = catalog.register_model(str(NAME), content, found=FOUND, weight_map=False)
    assert (registered.model_type, registered.weight_map) == ("llama", False)
    assert catalog.register_model(str(NAME), content) == registered
    open_version(catalog)
    for found in ((), FOUND):
        assert Catalog(catalog.store).register_model(str(NAME), content, found=found) == registered
    # and one that has a map and versions keeps it
    other = ModelName.parse("acme/mapped")
    catalog.register_model(str(other), content)
    catalog.heads.update(other, lambda head: (allocate(head)[0], None))
    shapes = catalog.model(other).tensors.values()
    with pytest.raises(FailedPrecondition, match="registered already"):
        catalog.register_model(str(other), content, found=list(shapes), weight_map=False)


# -- what is stored ------------------------------------------------------------------------------------------------------


def test_a_list_that_is_lost_or_damaged_is_told_and_the_head_is_not_believed(catalog: Catalog) -> None:
    catalog.register_model(str(NAME), files(), found=FOUND)
    [key] = catalog.store.list(f"{NAME.prefix}tensors/")
    content, _ = catalog.store.get(key)
    assert key == tensor_list_key(NAME, catalog.head(NAME).registration["listed"])
    assert json.loads(content)["tensors"][0] == ["transformer.h.0.attn.bias", "BOOL", [1, 1, 2, 2]]
    for damaged in (content[:-2], content.replace(b"[6,4]", b"[4,6]"), b"", b"{}"):
        catalog.store.put(key, damaged, mode="overwrite")
        with pytest.raises(DataLoss, match="does not agree with the digest"):
            Catalog(catalog.store).model(NAME)
    catalog.store.delete(key)
    with pytest.raises(DataLoss, match="list of the model's tensors, is missing") as caught:
        Catalog(catalog.store).model(NAME)
    assert "fsck" in caught.value.fix
    # calls that need no tensors still work, and registering with the tensors restores the list
    assert [model.name for model in Catalog(catalog.store).list_models()] == [str(NAME)]
    Catalog(catalog.store).register_model(str(NAME), files(), found=FOUND)
    assert set(tensors(Catalog(catalog.store)).values()) == set(FOUND)


def test_a_registration_that_names_no_list_is_damaged(catalog: Catalog) -> None:
    catalog.register_model(str(NAME), files(), found=FOUND)
    head = catalog.head(NAME)
    for listed in ("evil", "../../x", 5, ["a"], "A" * 64):
        wrong = replace(head, registration={**head.registration, "listed": listed})
        with pytest.raises(DataLoss, match="registration in the head of acme/other is damaged"):
            check_registration(NAME, wrong)


def test_a_replica_that_takes_a_version_over_is_given_the_list(catalog: Catalog) -> None:
    catalog.register_model(str(NAME), files(), found=FOUND)
    model = catalog.model(NAME)
    entry = OpenEntry(1, "id", 1, "r", 1, 1, 2, "files", 0, "claim")
    message = handed_to_proto(HandedVersion(model, entry, "claim", 1, [("client", "digest")], None), 1.0)
    taken = handed_from_proto(message).model
    assert (taken.files, taken.kept, taken.listed) == (model.files, model.kept, model.listed)
    assert registration_of(taken) == registration_of(model)
    sent = list(message.registration.listed)
    evil = resources_pb2.TensorSpec(name="a", dtype="evil", shape=[1])
    for tensors in (sent[1:], [], [*sent, sent[0]], [evil]):
        del message.registration.listed[:]
        message.registration.listed.extend(tensors)
        with pytest.raises((InvalidArgument, LayoutError)):
            handed_from_proto(message)


def test_a_list_of_any_length_is_handed_over_in_parts(catalog: Catalog) -> None:
    many = [TensorSpec(f"layers.{number}.weight", dtypes.parse("bf16"), (2, 3)) for number in range(40_000)]
    catalog.register_model(str(NAME), files(), found=many)
    model = catalog.model(NAME)
    entry = OpenEntry(1, "id", 1, "r", 1, 1, 2, "files", 0, "claim")
    message = handed_to_proto(HandedVersion(model, entry, "claim", 1, [("client", "digest")], None), 1.0)
    parts = list(request_parts.parts(message))
    assert len(parts) > 1
    joined = type(message)()
    for part in parts:
        joined.MergeFrom(part)
    assert handed_from_proto(joined).model.listed == model.listed


# -- through a service ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


def odd_folder(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A folder with tensors of all that safetensors has, by numpy."""
    rng = np.random.default_rng(3)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "scalar": np.array(3.5, np.float32),
        "counter": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "empty behind": np.zeros((3, 0), np.int32),
        "flags": rng.integers(0, 2, (3, 5)).astype(bool),
        "bytes": rng.integers(0, 256, 33, np.uint8),
        "doubles": rng.normal(size=(2, 3)),
        "short": rng.integers(-9, 9, (2, 2), np.int16),
        "complex": rng.normal(size=(2, 2)).astype(np.complex64),
        "eight.axes": rng.normal(size=(1, 2, 1, 2, 1, 2, 1, 2)).astype(np.float16),
        'Ünïcode/with spaces & "quotes" .0.': rng.normal(size=(4,)).astype(np.float32),
        "a" * 512: rng.normal(size=(4,)).astype(np.float32),
        "..": rng.normal(size=(1,)).astype(np.float32),
    }
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": {"AutoModel": "evil.Class"}}))
    return arrays


def test_tensors_of_every_kind_come_back_as_they_were(service: RunningService, tmp_path: Path) -> None:
    arrays = odd_folder(tmp_path / "odd")
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        version = trainer.import_folder("odd/all", tmp_path / "odd").wait(timeout=60)
        engine.export("odd/all", version.number, tmp_path / "pulled")
        found = load_file(tmp_path / "pulled" / "model.safetensors")
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
            assert found[name].tobytes() == array.tobytes(), name
        assert service.service.catalog.verify("odd/all", "latest").problems == ()
        part = dict(engine.pull("odd/all", 1, Boxes([("flags", (1, 2), (2, 3)), ("scalar", (), ())])))
        assert part["flags"].tolist() == arrays["flags"][1:, 2:].tolist()
        assert part["scalar"].item() == 3.5
        cast = dict(engine.pull("odd/all", 1, dtype="bf16"))
        assert {str(cast[name].dtype) for name in ("scalar", "doubles", "eight.axes")} == {"torch.bfloat16"}
        assert cast["counter"].tolist() == 7


def test_what_needs_megatrons_names_is_refused_and_said_what_works_instead(
    service: RunningService, tmp_path: Path
) -> None:
    odd_folder(tmp_path / "odd")
    layout = Layout.stream([TensorSpec("scalar", F32, ())], [Shard("scalar", Box((), ()))])
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        trainer.import_folder("odd/megatron", tmp_path / "odd").wait(timeout=60)
        asked: dict[str, Callable[[], object]] = {
            "push": lambda: trainer.push_shards(
                "odd/megatron",
                layout,
                TensorSpace.MEGATRON,
                NotSelected(),
                step=2,
                rank=0,
                world_size=1,
            ),
            "restore": lambda: list(trainer.restore_layout("odd/megatron", layout, lambda _index: torch.zeros(()))),
            "describe": lambda: trainer.describe_shards("odd/megatron", MegatronRank()),
            "slices": lambda: engine.pull("odd/megatron", 1, TensorParallel(2, 0)),
        }
        for what, ask in asked.items():
            with pytest.raises(
                InvalidArgument, match="no weight map for the model type 'odd' of odd/megatron"
            ) as caught:
                ask()
            assert "push_state_dict" in caught.value.fix, what
            assert "boxes" in caught.value.fix
            assert ", ".join(families.model_types()) in caught.value.details[0]
        # and the model still works
        assert trainer.push_folder("odd/megatron", tmp_path / "odd").wait(timeout=60).number > 1


def test_a_model_without_a_map_needs_neither_torch_nor_transformers_nor_mbridge(tmp_path: Path) -> None:
    odd_folder(tmp_path / "odd")
    program = f"""
import sys
from pathlib import Path
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.local import LocalStore

folder, store = Path({str(tmp_path / "odd")!r}), LocalStore(Path({str(tmp_path / "store")!r}))
config = (folder / "config.json").read_bytes()
specs = FolderWeights.read(folder, config).layout.tensors.values()
assert not Catalog(store).register_model("odd/light", {{"config.json": config}}, found=list(specs)).weight_map
model = Catalog(store).model(ModelName.parse("odd/light"))
assert model.files.layout.nbytes and model.identity
print(*({{"torch", "transformers", "mbridge", "megatron"}} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []


def test_scales_of_quantised_weights_are_cast_on_no_way_and_norms_beside_them_are(
    service: RunningService, tmp_path: Path
) -> None:
    w = "model.layers.0.mlp.down_proj"
    weights = {
        f"{w}.qweight": torch.ones(4, 4, dtype=torch.int32),
        f"{w}.scales": torch.rand(4, 4).half(),
        "model.norm.weight": torch.rand(4).half(),
    }
    (tmp_path / "gptq").mkdir()
    (tmp_path / "gptq/config.json").write_text('{"model_type": "odd", "quantization_config": {"quant_method": "gptq"}}')
    safetensors.torch.save_file(weights, tmp_path / "gptq/model.safetensors")
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        trainer.import_folder("odd/gptq", tmp_path / "gptq").wait(timeout=60)
        for out in (
            lambda: dict(engine.pull("odd/gptq", dtype="bf16")),
            lambda: engine.export("odd/gptq", "latest", tmp_path / "cast", dtype="bf16"),
        ):
            with pytest.raises(InvalidArgument, match=r"scales F16.* cannot be cast to BF16"):
                out()
        whole = dict(engine.pull("odd/gptq", dtype="fp16"))
        assert all(torch.equal(whole[name], tensor) for name, tensor in weights.items())
        norm = dict(engine.pull("odd/gptq", "latest", FullTensors(("model.norm.weight",)), dtype="fp32"))
        assert torch.equal(norm["model.norm.weight"], weights["model.norm.weight"].float())
        # nor by the dtype of a registration
        trainer.register_model("odd/registered", tmp_path / "gptq", dtype="fp32")
        registered = trainer.describe_tensors("odd/registered")
    assert {name: spec.dtype.short for name, spec in registered.items()} == {
        f"{w}.qweight": "i32", f"{w}.scales": "fp16", "model.norm.weight": "fp32",
    }  # fmt: skip


# -- by what a trainer holds ---------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """A custom model: tied weights, a scalar, a counter, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        self.nothing_else = torch.nn.Parameter(torch.zeros(0, 4))
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_a_module_on_any_device_says_the_same_and_is_pushed_by_its_names(
    service: RunningService, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "tied"}')
    model = Tied()
    with torch.device("meta"):
        meta = Tied()
    wrapped = torch.nn.Module()
    wrapped.module = torch.compile(model)  # type: ignore[assignment]
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        told = {
            (name, trainer.register_model("odd/tied", tmp_path, tensors=given).tensor_count)
            for name, given in (
                ("module", model),
                ("meta", meta),
                ("wrapped", wrapped),
                ("state", model.state_dict()),
            )
        }
        assert {count for _, count in told} == {len(model.state_dict()) - 1}
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        version = trainer.push_state_dict("odd/tied", wrapped, step=1, rank=0, world_size=1).wait(timeout=60)
        pulled = dict(engine.pull("odd/tied", version.number))
        assert pulled.keys() == expected.keys() - {"head.weight"}
        assert all(torch.equal(pulled[name], expected[name]) for name in pulled)
        fill(model.state_dict().values(), 9)
        trainer.restore_state_dict("odd/tied", model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        with pytest.raises(FailedPrecondition, match="registered already"):
            trainer.register_model("odd/tied", tmp_path, tensors=torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 5}, "the state dict contains values that are not tensors, in 1 entry"),
        (5, "is not a state dict"),
        ({"model.base_layer.weight": torch.zeros(1)}, "LoRA"),
        ([("a", torch.zeros(1)), ("_orig_mod.a", torch.zeros(2))], "given more than once"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({}, "no weight map"),
    ],
    ids=str,
)
def test_what_is_no_state_dict_registers_nothing(
    service: RunningService, tmp_path: Path, given: Any, message: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    with (
        TrainerClient(service.address) as trainer,
        pytest.raises((InvalidArgument, LayoutError), match=message),
    ):
        trainer.register_model("odd/none", tmp_path, tensors=given)
