"""Does a real vLLM with speculative decoding still accept drafts after updates, and report where it cannot?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.engines.test_vllm_ranks import Job, Ranks
from tests.support.drafted_models import make_drafted_folder
from tests.support.reference import MtpReference, tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.vllm_environment import HAS_KERNELS, PYTHON, environment, needs_vllm
from tests.support.word_models import PROMPT, make_folder
from weighbridge import EngineClient, TrainerClient
from weighbridge.follow import vllm as vllm_driver
from weighbridge.follow.agent import Follower
from weighbridge.follow.evidence import Evidence
from weighbridge.follow.proving import FAILED, IN_PART, PROVED, Proof, prove
from weighbridge_demo.vllm_server import EAGER, VllmServer

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not HAS_KERNELS, reason="nothing is computed without kernels"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

TOKENS = 24
DRAFTER, OTHER = "tests/draft", "tests/other"
"""Models that draft: one equal to ``tests/llama``, version by version, and one that no engine's drafter is like."""


@dataclass
class Place:
    """A service with two versions of two models, and the text that transformers generates with each."""

    address: str
    folders: Path
    texts: dict[tuple[str, int], str] = field(default_factory=dict)

    def run(self, do: str, model: str, *arguments: str) -> dict[str, Any]:
        """The observations of a job of `tests.support.vllm_drafter_job`."""
        done = subprocess.run(
            [PYTHON, "-m", "tests.support.vllm_drafter_job", do, self.address, model, PROMPT, *arguments],
            env={
                **environment(),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "WEIGHBRIDGE_CACHE": str(self.folders / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        answer = next(line for line in done.stdout.splitlines() if line.startswith("="))
        found: dict[str, Any] = json.loads(answer.removeprefix("="))
        return found

    def proved(self, model: str, number: int, evidence: dict[str, Any]) -> Proof:
        with EngineClient(self.address) as client:
            return prove(client, lambda _known: {"rank 0": Evidence.from_json(evidence)}, model, number)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folders = tmp_path_factory.mktemp("models")
    with (
        running_service(tmp_path_factory.mktemp("store")) as service,
        TrainerClient(service.address) as trainer,
    ):
        found = Place(service.address, folders)
        for model, make in (("tests/mimo", make_drafted_folder), ("tests/llama", make_folder)):
            for number in (1, 2):
                folder = folders / model / str(number)
                folder.mkdir(parents=True)
                found.texts[model, number] = _said(make(folder, number))
                if number == 1:
                    trainer.register_model(model, folder)
                trainer.push_folder(model, folder, step=number).wait(timeout=60)
        assert len(set(found.texts.values())) == 4, "the versions cannot be told apart"
        for number in (1, 2):  # as accepted as a drafter can be
            folder = folders / "tests/llama" / str(number)
            if number == 1:
                trainer.register_model(DRAFTER, folder)
            trainer.push_folder(DRAFTER, folder, step=number).wait(timeout=60)
        trainer.register_model(OTHER, folders / "tests/mimo" / "1")
        trainer.push_folder(OTHER, folders / "tests/mimo" / "1", step=1).wait(timeout=60)
        yield found


def _said(model: PreTrainedModel) -> str:
    """The text that transformers generates from the prompt, without a drafter."""
    tokens = [int(word[1:]) for word in PROMPT.split()]
    with torch.no_grad():
        found = model.generate(
            torch.tensor([tokens]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return " ".join(
        f"w{token}" for token in found[0, len(tokens) :].tolist() if token
    )  # vLLM leaves out w0, which stands for unknown words


def test_layers_that_draft_are_updated_with_the_policy_and_none_of_their_drafts_is_refused(
    place: Place,
) -> None:
    model = "tests/mimo"
    one, two = ([place.texts[model, number], 1.0, f"{model}@{number}", ""] for number in (1, 2))
    found = place.run("in_step", model)
    assert found["first"] == one
    assert found["updated"] == ["", "", two]
    proof, says = found["loaded again"]
    assert (proof["wrong"], says) == ([], two)
    assert found["undone"] == ["", one]
    assert found["woken 1"] == ["", two]
    assert found["woken 2"] == ["", two], "sleep has discarded the drafter, too"

    norm = "drafter.model.mtp_layers.2.final_layernorm.weight"
    for number in (1, 2):
        evidence = found[f"evidence {number}"]
        assert place.proved(model, number, evidence).ranks["rank 0"].wrong == ()
        assert norm in place.proved(model, 3 - number, evidence).ranks["rank 0"].wrong
        shared = {name for name in evidence["digests"] if "embed_tokens" in name or "lm_head" in name}
        assert not any(name.startswith("drafter.") for name in shared), "they are written once"
    spoilt = place.proved(model, 2, found["spoilt"])
    assert (spoilt.verdict, spoilt.ranks["rank 0"].wrong) == (FAILED, (norm,))


def test_a_drafter_that_versions_leave_alone_is_refused_by_name_or_said_to_be_stale(place: Place) -> None:
    model, drafter = "tests/llama", str(place.folders / "tests/llama" / "1")
    one, two = (place.texts[model, number] for number in (1, 2))
    found = place.run("apart", model, drafter)
    assert found["first"] == found["kept"] == [one, 1.0, f"{model}@1", ""]
    name = f"the drafter {drafter} (draft_model)"
    assert f"{name} would keep its weights when the engine takes {model}@2" in found["refused"]
    assert "start the engine without speculative decoding" in found["refused"]
    failed, [text, accepted, served, stale] = found["allowed"]
    assert (failed, text, served) == ("", two, f"{model}@2"), "what it says is right all the same"
    assert accepted < 0.5
    assert stale.startswith(f"{name} is stale")
    assert name in place.proved(model, 2, found["evidence"]).ranks["rank 0"].unseen
    assert found["back"] == ["", [one, 1.0, f"{model}@1", ""]]


def test_a_drafter_with_versions_of_its_own_has_the_one_that_is_named_with_the_policys_or_neither_is_taken(
    place: Place,
) -> None:
    model = "tests/llama"

    def says(number: int, accepted: float, drafter: int) -> list[Any]:
        return [place.texts[model, number], accepted, f"{model}@{number} + {DRAFTER}@{drafter}", ""]

    found = place.run("own", model, DRAFTER, OTHER)
    assert found["first"] == says(1, 1.0, 1)
    assert "would keep its weights when the engine takes tests/llama@2" in found["unnamed"]
    assert "only the last pipeline stage has the drafter" in found["stages"]
    assert found["both"] == ["", "", says(2, 1.0, 2)]
    proof, said = found["loaded again"]
    assert (proof["wrong"], said) == ([], says(2, 1.0, 2))
    refused, said = found["unfit"]
    assert OTHER in refused
    assert said == says(2, 1.0, 2), "neither was touched"
    assert found["undone"] == ["", says(1, 1.0, 1)]
    for alone, drafter in (("policy alone", 1), ("drafter alone", 2)):
        failed, (text, accepted, served, _) = found[alone]
        assert (failed, text, served) == ("", place.texts[model, 2], f"{model}@2 + {DRAFTER}@{drafter}")
        assert (accepted == 1.0) == (drafter == 2), "drafts of another version are refused"
    assert found["woken"] == says(2, 1.0, 2), "sleep has discarded both"

    proved = place.proved(model, 2, found["evidence"]).ranks["rank 0"]
    assert proved.wrong == ()
    assert any(name.startswith("drafter.") for name in found["evidence"]["digests"])
    false = {**found["evidence"], "served": f"{model}@2 + {DRAFTER}@1"}
    wrong = place.proved(model, 2, false).ranks["rank 0"].wrong
    assert wrong
    assert all(name.startswith("drafter.") for name in wrong), "the policy's are right"


def test_a_drafter_from_a_folder_gets_the_first_version_of_its_own_with_an_update(place: Place) -> None:
    model, folder = "tests/llama", str(place.folders / "tests/llama" / "1")
    found = place.run("later", model, folder, DRAFTER)
    assert found["first"] == [place.texts[model, 1], 1.0, f"{model}@1", ""]
    assert found["both"] == ["", [place.texts[model, 2], 1.0, f"{model}@2 + {DRAFTER}@2", ""]]
    assert found["loaded again"]["wrong"] == []


def test_a_live_server_of_two_ranks_is_taken_to_the_versions_that_both_refs_name(place: Place, tmp_path: Path) -> None:
    model, speculative = "tests/llama", {"method": "draft_model", "num_speculative_tokens": 2}
    arguments = ["--tensor-parallel-size", "2", *EAGER, "--speculative-config"]
    with (
        TrainerClient(place.address) as trainer,
        EngineClient(place.address) as client,
        VllmServer(
            PYTHON, place.address, model, tmp_path / "log", *arguments,
            json.dumps({**speculative, "model": DRAFTER, "draft_tensor_parallel_size": 2}),
            extra={"version": "1", "draft": f"{DRAFTER}@1"},
            environment={**environment(), "WEIGHBRIDGE_CACHE": str(tmp_path / "cache")},
        ) as server,
    ):  # fmt: skip
        for each in (DRAFTER, model):
            trainer.set_ref(each, "play", 1)
        server.wait_ready()

        def seen() -> tuple[list[str], str]:
            return server.complete(PROMPT, TOKENS).text.replace("w0", "").split(), server.weight_version()

        def both(number: int, draft: int) -> tuple[list[str], str]:
            return place.texts[model, number].split(), f"{model}@{number} + {DRAFTER}@{draft}"

        assert seen() == both(1, 1), "it says so from its start"
        engine = vllm_driver.VllmServer(server.url, model, place.address)
        steps = Follower(client, model, engine, "play", draft=(DRAFTER, "play"), prove_every=1).run()
        for moved, number, draft in ((None, 1, 1), (DRAFTER, 1, 2), (model, 2, 2), (DRAFTER, 2, 1)):
            if moved is not None:
                trainer.set_ref(moved, "play", number if moved == model else draft)
            line = next(steps)
            assert (line.serves, line.drafter, line.error) == (number, f"{DRAFTER}@{draft}", "")
            # on a CPU linear layers are packed, which a load sees, with which the first proof compares
            assert line.proof == (PROVED if moved is None else IN_PART)
            assert seen() == both(number, draft)


@pytest.fixture(scope="module")
def drafted(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on a GLM whose layers for prediction have other output layers in the checkpoint than the model, which
    engines leave out.
    """
    config = tiny_config("glm4_moe_mtp", tied=False)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 128, 32
    folders = []
    with TrainerClient(place.address) as trainer:
        for number in (1, 2):
            folders.append(folder := tmp_path_factory.mktemp("drafted"))
            model = tiny_model(config, seed=number)
            model.save_pretrained(folder)
            file = folder / "model.safetensors"
            tensors = {**load_file(file), **MtpReference(model, number).tensors(model)}
            heads = [name for name in tensors if name.endswith(("shared_head.head.weight", "4.embed_tokens.weight"))]
            tensors |= {name: torch.randn_like(tensors[name]) for name in heads}
            save_file(
                {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
                file,
                {"format": "pt"},
            )
            if number == 1:
                trainer.register_model("tests/drafted", folder)
            trainer.push_folder("tests/drafted", folder, step=number).wait(timeout=60)
    one, two = map(str, folders)
    return {"do": "drafter", "of": "drafted", "as_loaded": True, "folder": one, "folder2": two}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_drafter_has_the_bits_of_a_fresh_load_and_its_model_keeps_its_own_output_layer(
    place: Place, drafted: Job, tp: int
) -> None:
    [(_, said)] = Ranks(place.address, place.folders).run(tp, [drafted])
    for rank in said:
        assert set(map(tuple, rank["different"].values())) == {()}, rank
        assert (rank["moved"], rank["served"]) == (False, "tests/drafted@2")
        assert rank["shared"] == 2


def test_methods_that_draft_without_a_model_and_stages_without_the_drafter_have_none(
    place: Place, drafted: Job
) -> None:
    [(_, [said])] = Ranks(place.address, place.folders).run(1, [{**drafted, "do": "drafters_named"}])
    of_policy = f"the drafter {drafted['folder']} (mtp)"
    assert said == {
        "ngram": "",
        "custom_class": "",
        "mtp, first stage": "",
        "mtp, last stage": of_policy,
    }


def test_a_version_without_layers_that_draft_is_refused_by_their_names_or_leaves_them_as_they_are(
    place: Place, drafted: Job, tmp_path: Path
) -> None:
    model, folder = "tests/undrafted", Path(drafted["folder2"])
    tensors = load_file(folder / "model.safetensors")
    plain = {
        name: each for name, each in tensors.items() if not name.startswith(("model.layers.4.", "model.layers.5."))
    }
    assert len(plain) < len(tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    with TrainerClient(place.address) as trainer:
        trainer.register_model(model, tmp_path)
        trainer.push_folder(model, tmp_path).wait(timeout=60)
    job = {**drafted, "do": "drafter_left", "of": "undrafted"}
    [(_, [said])] = Ranks(place.address, place.folders).run(1, [job])
    name = f"the drafter {drafted['folder']} (mtp)"
    assert "model.layers.4" in said["refused"] or "drafter." in said["refused"]
    assert "allow a stale drafter" in said["refused"]
    assert (said["different"], said["changed"], said["shared"]) == ([], [], 2)
    assert said["own"] > 5
    assert said["stale"].startswith(f"{name} is stale")
    assert said["unseen"][name] == "updates do not change it"
