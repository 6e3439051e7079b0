"""Is an adapter kept as peft saved it, on a base that is kept with it, and does it come back to compute the same?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.service.api.http.hub.endpoint import endpoint_of
from tests.support.identities import identity, policy_file
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.signing import new_key, signature_of, stock_verify
from tests.support.torch_ranks import run_ranks
from weighbridge import (
    Credentials,
    EngineClient,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Signatures,
    Signer,
    TensorParallel,
    TrainerClient,
    Unavailable,
)
from weighbridge._cli import commands
from weighbridge._core.metadata import BASE as BASE_KEY
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import Gate, Retention
from weighbridge._trainers.peft_adapters import AdapterFolder
from weighbridge.integrations.engine_rank.preparation import check_model
from weighbridge_service.catalog.bases import Bases
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.open_versions import Said

peft = pytest.importorskip("peft")
BASE, ALICE = "acme/smol", "acme/alice"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)
TOKENS = torch.arange(24).reshape(2, 12)


def adapted(**options: Any) -> Any:
    """A model with an adapter that changes what it computes; the same at each call."""
    given = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options}
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), peft.LoraConfig(**given))


def log_probabilities(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model.eval()(input_ids=TOKENS).logits, -1)


def loaded(folder: Path) -> Any:
    """The model that peft loads from a folder, on the base as it was pushed."""
    return peft.PeftModel.from_pretrained(tiny_model(CONFIG, seed=1), folder)


@dataclass
class Service:
    """A service with three versions of a base."""

    running: RunningService
    trainer: TrainerClient
    base: Path

    def push(self, model: str, base: str = f"{BASE}@1", step: int = 1, **options: Any) -> Any:
        return self.trainer.push_adapter(model, adapted(**options), base=base, step=step).wait(timeout=60)

    def export(self, model: str, folder: Path) -> Path:
        with EngineClient(self.running.address) as engine:
            engine.export(model, "latest", folder)
        return folder


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Service]:
    base = folder / "base"
    tiny_model(CONFIG, seed=1).save_pretrained(base)
    with running_service(folder / "store", **settings) as running, TrainerClient(running.address) as trainer:
        for step in range(3):
            trainer.import_folder(BASE, base, step=step).wait(timeout=60)
        yield Service(running, trainer, base)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("adapters")) as found:
        yield found


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\..*down_proj": 3}},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only", "target_modules": "all-linear"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "expression": {"target_modules": r".*layers\.(0|1)\.mlp\.(up|down)_proj"},
    "parameters": {"target_modules": ["down_proj"], "target_parameters": ["q_proj.weight"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_loads_of_an_export_computes_what_was_pushed(kind: str, service: Service, tmp_path: Path) -> None:
    model = adapted(**KINDS[kind])
    name = f"acme/{kind.replace('_', '-')}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of embeddings
        version = service.trainer.push_adapter(name, model, base=f"{BASE}@latest", step=7).wait(timeout=60)
        model.save_pretrained(tmp_path / "saved")
    assert BaseVersion.of(version.metadata) is not None
    out = service.export(name, tmp_path / "out")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    there = load_file(out / "adapter_model.safetensors")
    assert there.keys() == saved.keys()
    assert all(torch.equal(there[each], tensor) for each, tensor in saved.items())
    config, expected = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (out, tmp_path / "saved")
    )
    for listed in ("target_modules", "modules_to_save"):  # sets, which peft writes in any order
        if isinstance(config[listed], list):
            config[listed], expected[listed] = sorted(config[listed]), sorted(expected[listed])
    assert config == expected
    assert torch.equal(log_probabilities(loaded(out)), log_probabilities(model))


def _doubled(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state.update({name: 2 * value for name, value in state.items() if name.startswith(prefix)})


def test_every_push_has_the_tensors_that_peft_would_save_then(service: Service, tmp_path: Path) -> None:
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj

    def replaced() -> None:
        layer.lora_A["default"].weight = torch.nn.Parameter(torch.full_like(layer.lora_A["default"].weight, 0.5))

    def renamed() -> None:
        model.base_model.model.add_module("beside", torch.nn.Linear(3, 3))

    def hooked() -> None:
        layer.lora_B["default"]._register_state_dict_hook(_doubled)

    changes = [
        lambda: None,
        replaced,
        lambda: None,
        renamed,
        hooked,
        lambda: layer.lora_B["default"].weight.data.add_(1),
    ]
    for step, change in enumerate(changes):
        change()
        service.trainer.push_adapter("acme/changing", model, base=f"{BASE}@1", step=step).wait("durable", timeout=60)
        found = load_file(service.export("acme/changing", tmp_path / str(step)) / "adapter_model.safetensors")
        expected = peft.get_peft_model_state_dict(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), step


def test_an_adapter_that_fits_one_base_is_refused_on_another(service: Service, tmp_path: Path) -> None:
    service.push("acme/fitting")
    wider = CONFIG.intermediate_size + 32
    config = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131, intermediate_size=wider)
    broad = tiny_model(config, seed=1)
    broad.save_pretrained(tmp_path / "broad")
    service.trainer.import_folder("acme/broad", tmp_path / "broad", step=1).wait("durable", timeout=60)
    with pytest.raises(LayoutError, match="down_proj"):
        service.push("acme/fitting", "acme/broad@1", step=2)
    service.push("acme/fitting", step=3)


def test_a_version_names_its_base_by_number_and_by_the_digest_of_its_manifest(service: Service) -> None:
    service.trainer.set_ref(BASE, "prod", 2)
    version = service.push("acme/named", f"{BASE}@prod")
    found = BaseVersion.of(version.metadata)
    store = Path(service.running.service.config.store)
    manifest = json.loads((store / f"models/{BASE}/versions/000000000002/weighbridge.json").read_text())
    assert found == BaseVersion(BASE, 2, manifest["digest"])
    own = json.loads((store / "models/acme/named/versions/000000000001/weighbridge.json").read_text())
    assert BaseVersion.of(own["metadata"]) == found
    assert sorted(own["parts"]["weights"]["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    service.trainer.set_ref(BASE, "prod", 3)
    assert BaseVersion.of(service.trainer.version("acme/named", 1).metadata) == found
    models = {each.name: each for each in service.trainer.models()}
    assert "acme/named" in models[BASE].adapters
    assert models["acme/named"].base == f"{BASE}@2"


def test_a_list_of_versions_reads_the_head_of_their_base_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        service.push("acme/listed", f"{BASE}@{number}", step=number)
    catalog, asked = service.running.service.catalog, []
    history = catalog.heads.history
    monkeypatch.setattr(catalog.heads, "history", lambda model: (asked.append(str(model)), history(model))[1])
    assert [each.error for each in catalog.list_versions("acme/listed")] == ["", "", ""]
    assert asked.count(BASE) == 1


def test_a_folder_is_imported_by_its_base_and_without_one_refused(service: Service, tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path / "a")
    handle = service.trainer.import_adapter("acme/imported", tmp_path / "a", base=f"{BASE}@3")
    version = handle.wait(timeout=60)
    assert str(BaseVersion.of(version.metadata)) == f"{BASE}@3"
    out = service.export("acme/imported", tmp_path / "out")
    assert torch.equal(log_probabilities(loaded(out)), log_probabilities(adapted()))
    assert (out / "adapter_config.json").read_bytes() == (tmp_path / "a" / "adapter_config.json").read_bytes()
    with pytest.raises(NotFound, match="is a PEFT adapter") as refused:
        service.trainer.import_folder("acme/other", tmp_path / "a")
    assert "--base" in refused.value.fix
    with pytest.raises(InvalidArgument, match="is a model, not an adapter"):
        service.trainer.import_adapter("acme/other", service.base, base=f"{BASE}@1")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match=r"adapter_model\.bin is a pickle"):
        service.trainer.import_adapter("acme/other", tmp_path / "a", base=f"{BASE}@1")


def test_an_adapter_that_is_not_of_the_base_is_refused_with_the_first_names(service: Service, tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False, num_hidden_layers=3, vocab_size=131)
    deeper = peft.get_peft_model(tiny_model(config, seed=1), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(LayoutError, match="acme/smol@1 lacks 1 module of the adapter") as lacks:
        service.trainer.push_adapter("acme/deeper", deeper, base=f"{BASE}@1", step=1)
    assert list(lacks.value.details) == ["model.layers.2.self_attn.q_proj"]
    config = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131, intermediate_size=80)
    wider = peft.get_peft_model(tiny_model(config, seed=1), peft.LoraConfig(target_modules=["down_proj"]))
    with pytest.raises(LayoutError, match=r"2 tensors of the adapter do not fit .* acme/smol@1"):
        service.trainer.push_adapter("acme/wider", wider, base=f"{BASE}@1", step=1)
    with pytest.raises(NotFound):
        service.push("acme/nobase", f"{BASE}@99")
    service.push("acme/first")
    with pytest.raises(InvalidArgument, match="the base acme/first@1 is an adapter itself"):
        service.push("acme/second", "acme/first@1")
    assert "acme/deeper" not in service.trainer.model(BASE).adapters
    deeper.save_pretrained(tmp_path / "deeper")
    with pytest.raises(LayoutError, match="acme/smol@1 lacks 1 module of the adapter"):
        service.trainer.import_adapter("acme/imported-deeper", tmp_path / "deeper", base=f"{BASE}@1")
    for base in (f"{BASE}@1", f"{BASE}@99", "acme/nothing@1"):
        line = ["import", str(tmp_path / "deeper"), "acme/typed-deeper", "--base", base]
        assert CliRunner().invoke(commands, [*line, "--server", service.running.address]).exit_code == 1
    refused = {"deeper", "wider", "nobase", "second", "imported-deeper", "typed-deeper"}
    assert not {f"acme/{name}" for name in refused} & {each.name for each in service.trainer.models()}


def test_another_rank_needs_another_name_and_another_alpha_does_not(service: Service, tmp_path: Path) -> None:
    service.push("acme/ranked", lora_alpha=4)
    service.push("acme/ranked", step=2, lora_alpha=16)
    assert json.loads((service.export("acme/ranked", tmp_path / "o") / "adapter_config.json").read_text())[
        "lora_alpha"
    ] == 16  # fmt: skip
    with pytest.raises(FailedPrecondition, match="rank, target modules and dtypes of an adapter stay") as other:
        service.push("acme/ranked", step=3, r=8)
    assert "different model name" in other.value.fix


def test_whole_models_and_adapters_keep_out_of_each_others_names(service: Service, tmp_path: Path) -> None:
    service.push(ALICE)
    whole, trainer = tiny_model(CONFIG, seed=1), service.trainer
    for refused in (
        lambda: trainer.push_state_dict(ALICE, whole, step=9),
        lambda: trainer.push_gathered(ALICE, whole.state_dict().items(), step=9),
        lambda: trainer.restore_state_dict(ALICE, whole),
        lambda: trainer.push_folder(ALICE, service.base, step=9),
        lambda: trainer.import_folder(ALICE, service.base),
        lambda: trainer.push_adapter(BASE, adapted(), base=f"{BASE}@1", step=9),
    ):
        with pytest.raises((InvalidArgument, FailedPrecondition), match="adapter") as error:
            refused()
        assert error.value.fix
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with pytest.raises((InvalidArgument, FailedPrecondition), match="adapter"):
        trainer.push_state_dict(ALICE, whole, step=9, optimizer=optimizer)
    with pytest.raises(InvalidArgument, match="not a model of peft"):
        trainer.push_adapter("acme/none", whole, base=f"{BASE}@1", step=1)
    with pytest.raises(InvalidArgument, match="no adapter 'other'"):
        trainer.push_adapter("acme/none", adapted(), base=f"{BASE}@1", step=1, adapter_name="other")


def test_engines_refuse_a_version_of_an_adapter(service: Service) -> None:
    version = service.push("acme/engined")
    with (
        EngineClient(service.running.address) as client,
        pytest.raises(FailedPrecondition, match="acme/engined is an adapter on acme/smol@1") as refused,
    ):
        check_model(None, client, version)
    assert "peft" in refused.value.fix
    with (
        EngineClient(service.running.address) as client,
        pytest.raises(InvalidArgument, match="acme/engined is an adapter"),
    ):
        client.pull("acme/engined", 1, TensorParallel(2, 0))


def test_huggings_faces_client_and_peft_load_an_adapter_from_the_endpoint(service: Service, tmp_path: Path) -> None:
    service.push("acme/hub")
    with endpoint_of(service.running) as endpoint:
        code = "from huggingface_hub import snapshot_download\nsay(snapshot_download('acme/hub'))"
        folder = Path(endpoint.python(tmp_path, code))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert torch.equal(log_probabilities(loaded(folder)), log_probabilities(adapted()))


def test_a_signature_covers_the_base(service: Service, tmp_path: Path) -> None:
    service.push("acme/signed")
    keys = new_key(tmp_path)
    with EngineClient(service.running.address) as client:
        Signatures(client).sign("acme/signed", 1, signer=Signer(keys.key))
        client.export("acme/signed", 1, tmp_path / "out")
    signature = signature_of(tmp_path / "out")
    assert stock_verify(tmp_path / "out", signature, keys.public)[0]
    manifest = tmp_path / "out" / "weighbridge.json"
    manifest.write_text(manifest.read_text().replace(f"{BASE}@1", f"{BASE}@2"))
    assert not stock_verify(tmp_path / "out", signature, keys.public)[0]


def test_the_base_is_kept_as_long_as_the_adapter_and_deleted_only_by_force(tmp_path: Path) -> None:
    with serving(tmp_path) as service, running_service(tmp_path / "store") as second:
        trainer = service.trainer
        service.push(ALICE, f"{BASE}@1")
        with TrainerClient(second.address) as other:  # a replica of the same store sees the pin
            assert other.model(BASE).adapters == (ALICE,)
            other.set_retention(BASE, Retention(keep_last=1))
            report = other.collect(BASE)
            assert report.retired == (2,)
            assert {each.number: each.rules for each in report.kept}[1] == ("adapters",)
            with pytest.raises(FailedPrecondition, match=f"version 1 is the base of {ALICE}") as pinned:
                other.delete_version(BASE, 1)
            assert "--force" in pinned.value.fix
            with pytest.raises(FailedPrecondition, match=ALICE):
                other.delete_model(BASE)
        service.push(ALICE, f"{BASE}@3", step=2)
        assert trainer.version(ALICE, 1).error == ""
        service.push("acme/back", f"{BASE}@1")
        service.push("acme/back", f"{BASE}@3", step=2)
        trainer.set_gate("acme/back", Gate(approval_required=True))
        service.push("acme/back", f"{BASE}@1", step=3)
        trainer.delete_version("acme/back", 3)
        assert trainer.model("acme/back").base == f"{BASE}@3"  # not that of a version that is deleted
        trainer.delete_version(BASE, 1, force=True)
        assert trainer.version(ALICE, 1).error == f"its base {BASE}@1 was deleted"
        assert [each.error for each in trainer.versions(ALICE)] == ["", f"its base {BASE}@1 was deleted"]
        with pytest.raises((NotFound, FailedPrecondition)):
            service.push(ALICE, f"{BASE}@1", step=3)
        trainer.delete_model(ALICE)
        trainer.delete_model("acme/back")
        trainer.collect(BASE)
        assert trainer.model(BASE).adapters == ()


def test_the_owner_of_a_base_deletes_it_whole_by_force_and_learns_no_secret_names(tmp_path: Path) -> None:
    policy = policy_file(
        tmp_path,
        identity("owner", ["push:acme/*", "pull:acme/*", "manage:acme/*"], token="owner"),
        identity("other", ["push:secret/*", "pull:secret/*", "pull:acme/*"], token="other"),
    )
    with serving(tmp_path / "open") as service:  # the newest version is what latest names
        service.push(ALICE, f"{BASE}@3")
        with pytest.raises(FailedPrecondition, match=f"are the base of {ALICE}") as refused:
            service.trainer.delete_model(BASE)
        assert "--force" in refused.value.fix
        assert service.trainer.delete_model(BASE, force=True).versions == 3
        assert service.trainer.version(ALICE, 1).error == f"its base {BASE}@3 was deleted"
        service.trainer.collect(ALICE)
        service.trainer.import_folder(BASE, service.base).wait(timeout=60)
        assert service.trainer.model(BASE).adapters == ()
        assert service.trainer.version(ALICE, 1).error == f"its base {BASE}@3 was deleted"
    with running_service(tmp_path / "store", policy=policy) as running:

        def client(name: str) -> TrainerClient:
            return TrainerClient(running.address, credentials=Credentials(token=name))

        with client("owner") as owner, client("other") as other:
            owner.import_folder(BASE, service.base).wait(timeout=60)
            owner.import_folder(BASE, service.base, step=2).wait(timeout=60)
            other.push_adapter("secret/hidden", adapted(), base=f"{BASE}@1", step=1).wait(timeout=60)
            assert owner.model(BASE).adapters == ()
            assert owner.register_model(BASE, service.base).adapters == ()
            for delete in (lambda: owner.delete_version(BASE, 1), lambda: owner.delete_model(BASE)):
                with pytest.raises(FailedPrecondition, match="1 adapter that you may not") as hidden:
                    delete()
                assert "secret" not in str(hidden.value)


def test_who_may_not_pull_the_base_pins_nothing_and_pins_are_bounded(tmp_path: Path) -> None:
    policy = policy_file(
        tmp_path,
        identity("root", ["admin"], token="root"),
        identity("stranger", ["push:acme/alice", "pull:acme/alice"], token="stranger") + "limits = {adapters = 1}\n",
        identity("alice", ["push:acme/*", "pull:acme/*"], token="alice") + "limits = {adapters = 1}\n",
    )
    base = tmp_path / "base"
    tiny_model(CONFIG, seed=1).save_pretrained(base)
    with running_service(tmp_path / "store", policy=policy) as running:

        def client(name: str) -> TrainerClient:
            return TrainerClient(running.address, credentials=Credentials(token=name))

        with client("root") as root, client("stranger") as stranger, client("alice") as alice:
            root.import_folder(BASE, base).wait(timeout=60)
            with pytest.raises(PermissionDenied, match=f"stranger may not pull {BASE}"):
                stranger.push_adapter(ALICE, adapted(), base=f"{BASE}@1", step=1)
            assert root.model(BASE).adapters == ()
            assert [each.name for each in root.models()] == [BASE]
            alice.push_adapter(ALICE, adapted(), base=f"{BASE}@1", step=1).wait(timeout=60)
            alice.push_adapter(ALICE, adapted(), base=f"{BASE}@1", step=2).wait(timeout=60)
            with pytest.raises(ResourceExhausted, match="alice may have adapters on 1 version"):
                alice.push_adapter("acme/bob", adapted(), base=f"{BASE}@1", step=1)
            assert root.model(BASE).adapters == (ALICE,)
            assert [each.name for each in root.models()] == [ALICE, BASE]
            assert alice.usage().identity == "alice"


def test_commands_import_list_and_delete(service: Service, tmp_path: Path) -> None:
    def run(*line: str, code: int = 0) -> str:
        done = CliRunner().invoke(commands, [*line, "--server", service.running.address])
        assert done.exit_code == code, done.output
        return done.output

    adapted().save_pretrained(tmp_path / "step-12")
    folder = str(tmp_path / "step-12")
    assert "--base" in run("import", folder, "acme/typed", code=1)
    assert "acme/typed@1" in run("import", folder, "acme/typed", "--base", f"{BASE}@1")
    assert "--dtype is for weights" in run("import", folder, "acme/t", "--base", f"{BASE}@1", "--dtype", "bf16", code=1)
    models = run("models")
    assert f"adapter on {BASE}@1" in models
    assert "acme/typed" in models.split(f"\n{BASE} ")[1]
    listed = run("versions", "acme/typed")
    assert f"{BASE}@1" in listed
    assert "weighbridge.base" not in listed
    assert json.loads(run("versions", "acme/typed", "--json"))[0]["step"] == 12
    assert json.loads(run("versions", "acme/typed", "--where", f"weighbridge.base={BASE}@1", "--json"))
    assert f"base:     {BASE}@1" in run("show", "acme/typed")
    assert "is the base of" in run("delete", f"{BASE}@1", code=1)
    assert "acme/typed is an adapter" in run("follow", "acme/typed", code=1)
    assert "acme/typed is an adapter" in run("prove", "acme/typed@1", code=1)
    assert "is an adapter" in run("restore", "acme/typed@1", "--out", str(tmp_path / "r"), code=1)


def test_ranks_that_name_different_bases_are_refused_wherever_they_open(tmp_path: Path) -> None:
    def opened_at(running: RunningService, base: str) -> int:
        asked = {"step": 2, "run": "r", "ranks": 2, "request_id": "q", "client_id": base}
        return running.service.intake.opener.open_version(ALICE, **asked, said=Said(metadata={BASE_KEY: base})).number

    with serving(tmp_path) as service, running_service(tmp_path / "store") as second:
        service.push(ALICE)
        number = opened_at(service.running, f"{BASE}@1")
        for running in (service.running, second):
            with pytest.raises(InvalidArgument, match=f"different bases of version 2: {BASE}@1 and {BASE}@2"):
                opened_at(running, f"{BASE}@2")
            assert opened_at(running, f"{BASE}@1") == number == 2


def _register(trainer: TrainerClient, name: str, folder: AdapterFolder) -> None:
    """Register an adapter as another job does."""
    files, tensors = {"adapter_config.json": folder.config_json}, folder.layout.tensors.values()
    trainer.register_files(name, files, "", tensors, weight_map=False)


def _registrations(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are registered from now on, once for each time."""
    catalog, asked = service.running.service.catalog, []
    register = catalog.register_model
    monkeypatch.setattr(
        catalog, "register_model", lambda name, *a, **k: (asked.append(name), register(name, *a, **k))[1]
    )
    return asked


def test_an_adapter_is_registered_by_its_first_push_and_by_one_with_another_config(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _registrations(service, monkeypatch)
    adapted(lora_alpha=4).save_pretrained(tmp_path / "four")
    for step, (alpha, base, registered) in enumerate([(4, 1, 1), (4, 1, 1), (4, 2, 1), (9, 2, 2), (9, 1, 2)]):
        service.push("acme/again", f"{BASE}@{base}", step=step, lora_alpha=alpha)
        assert len(asked) == registered, (step, asked)
        found = json.loads((service.export("acme/again", tmp_path / f"{step}") / "adapter_config.json").read_text())
        assert found["lora_alpha"] == alpha
    name = "acme/again-imported"
    for step in range(3):
        service.trainer.import_adapter(name, tmp_path / "four", base=f"{BASE}@1", step=step).wait(timeout=60)
    assert asked.count(name) == 1


def test_a_push_that_registers_nothing_pins_its_base_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.push("acme/pinned", f"{BASE}@1")
    asked = _registrations(service, monkeypatch)
    heads = service.running.service.catalog.heads

    def pins() -> set[int]:
        found = heads.read(ModelName.parse(BASE))
        assert found is not None
        return {each.version for each in found[0].pins if each.adapter == "acme/pinned"}

    service.push("acme/pinned", f"{BASE}@2", step=2)
    assert pins() == {1, 2}
    heads.update(ModelName.parse(BASE), lambda head: (replace(head, pins=()), None))
    service.push("acme/pinned", f"{BASE}@2", step=3)
    assert pins() == {2}
    assert asked == []


def test_a_config_that_another_job_registers_while_a_version_is_opened_is_not_the_versions(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, find, late = "acme/raced", Bases.find, iter([True])
    service.push(name, lora_alpha=4)
    adapted(lora_alpha=7).save_pretrained(tmp_path / "a")
    folder = AdapterFolder.read(tmp_path / "a")

    def find_late(self: Bases, *asked: Any) -> BaseVersion | None:
        found = find(self, *asked)
        if next(late, False):
            _register(service.trainer, name, folder)
        return found

    monkeypatch.setattr(Bases, "find", find_late)
    assert service.push(name, step=2, lora_alpha=4).number == 2
    config = service.export(name, tmp_path / "o") / "adapter_config.json"
    assert json.loads(config.read_text())["lora_alpha"] == 4
    # a second time in one push: the error names the job that does it, and no version stays open
    late = iter([True, True])
    with pytest.raises(FailedPrecondition, match=f"{name} is registered with a different adapter_config"):
        service.push(name, step=3, lora_alpha=4)
    assert {each.number for each in service.trainer.versions(name, include_invisible=True)} == {1, 2}


def test_a_name_that_becomes_an_adapters_while_a_version_is_opened_gets_none_without_a_base(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, find = "acme/turned", Bases.find
    adapted().save_pretrained(tmp_path / "a")
    folder = AdapterFolder.read(tmp_path / "a")
    service.trainer.register_model(name, service.base)

    def find_late(self: Bases, *asked: Any) -> BaseVersion | None:
        found = find(self, *asked)
        _register(service.trainer, name, folder)
        return found

    monkeypatch.setattr(Bases, "find", find_late)
    with pytest.raises(Unavailable, match=f"{name} was registered anew"):
        service.running.service.intake.opener.open_version(
            name, step=1, run="r", ranks=1, request_id="q", client_id="c"
        )


def _rank(rank: int, address: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with TrainerClient(address) as trainer:
        replicated = DistributedDataParallel(adapted())
        trainer.push_adapter("acme/ddp", replicated, base=f"{BASE}@latest", step=1).wait(timeout=100)
        model, mesh = adapted(), init_device_mesh("cpu", (2,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        trainer.push_adapter("acme/fsdp", model, base=f"{BASE}@latest", step=1).wait(timeout=100)
    return {}


def test_ranks_of_ddp_and_fsdp2_push_one_adapter_together(service: Service, tmp_path: Path) -> None:
    run_ranks(2, _rank, service.running.address)
    for name in ("ddp", "fsdp"):
        out = service.export(f"acme/{name}", tmp_path / name)
        assert torch.equal(log_probabilities(loaded(out)), log_probabilities(adapted())), name


def test_heads_that_are_rebuilt_name_the_base_and_pin_it_again(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        service.push(ALICE, f"{BASE}@2")
    for model in (BASE, ALICE):
        (tmp_path / "store" / "models" / model / "head.json").unlink()
    done = CliRunner().invoke(commands, ["fsck", str(tmp_path / "store"), "--repair"])
    assert done.exit_code == 0, done.output
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as trainer:
        assert trainer.model(ALICE).base == f"{BASE}@2"
        assert trainer.model(BASE).adapters == (ALICE,)
        with pytest.raises(FailedPrecondition, match=f"version 2 is the base of {ALICE}"):
            trainer.delete_version(BASE, 2)


def test_a_head_that_has_lost_its_pins_has_them_again_after_a_collection_of_the_adapter(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as service:
        service.push(ALICE, f"{BASE}@2")
        heads = service.running.service.catalog.heads
        heads.update(ModelName.parse(BASE), lambda head: (replace(head, pins=()), None))
        service.trainer.collect(ALICE)
        assert service.trainer.model(BASE).adapters == (ALICE,)
