"""Is a separate output head refused where the config or transformers' class ties it to the embedding, in models without
a weight map?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.services import running_service
from tests.support.unmapped_models import unmapped_model
from weighbridge import TrainerClient
from weighbridge._formats.naming.parameter_names import head_and_embedding
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge_service.models.library_models import compare_with_library, compared_by

OF_4 = transformers.__version__.startswith("4.")
TIES = [
    ("gpt_neox", True, "embed_out.weight", "gpt_neox.embed_in.weight"),
    ("opt", None, "lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("gpt2", None, "lm_head.weight", "transformer.wte.weight"),
    ("bert", None, "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("whisper", None, "proj_out.weight", "model.decoder.embed_tokens.weight"),
]
"""Model type, what its config says of ties, the head and the embedding."""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerClient]:
    with ExitStack() as stack:
        stack.enter_context(compared_by(compare_with_library))
        service = stack.enter_context(running_service(tmp_path / "store"))
        yield stack.enter_context(TrainerClient(service.address))


def folder(path: Path, model_type: str, said: bool | None, head: str, embedding: str, differs: float) -> Path:
    """A folder of a model whose class or config ties its head, with a separate head in its files."""
    unmapped_model(model_type).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config |= {} if said is None else {"tie_word_embeddings": said}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors[head] = tensors[embedding] + differs
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def head_in_transformers(path: Path) -> torch.Tensor:
    config: Any = json.loads((path / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(path)
    return model.get_output_embeddings().weight.detach()


@pytest.mark.parametrize(("model_type", "said", "head", "embedding"), TIES)
def test_a_head_of_other_values_than_the_embedding_that_it_is_tied_to_is_refused_with_both_names(
    trainer: TrainerClient, tmp_path: Path, model_type: str, said: bool | None, head: str, embedding: str
) -> None:
    path = folder(tmp_path / "hf", model_type, said, head, embedding, 1.0)
    if OF_4:  # transformers 5 loads it as a separate head, with a warning; engines tie it
        assert torch.equal(head_in_transformers(path), load_file(path / "model.safetensors")[embedding])
    with pytest.raises(InvalidArgument, match=f"{head} is not the same as {embedding}") as error:
        trainer.import_folder("tests/tied", path)
    assert "tie_word_embeddings" in error.value.fix


@pytest.mark.parametrize(("model_type", "said", "head", "embedding"), TIES)
def test_a_copy_of_the_embedding_is_left_out_at_every_door(
    trainer: TrainerClient, tmp_path: Path, model_type: str, said: bool | None, head: str, embedding: str
) -> None:
    path = folder(tmp_path / "hf", model_type, said, head, embedding, 0.0)
    trainer.import_folder("tests/tied", path).wait(timeout=60)
    trainer.push_folder("tests/tied", path, step=2).wait(timeout=60)
    trainer.register_model("tests/tied", path)
    own = load_file(path / "model.safetensors")
    own[head] = own[embedding]  # as a module ties them
    trainer.push_state_dict("tests/tied", own, step=3).wait(timeout=60)
    assert trainer.model("tests/tied").tensor_count == len(own) - 1
    other = folder(tmp_path / "other", model_type, said, head, embedding, 1.0)
    with pytest.raises(InvalidArgument, match=f"{head} is not the same as {embedding}"):
        trainer.push_folder("tests/tied", other, step=4)
    with pytest.raises(LayoutError, match=head):
        trainer.push_state_dict("tests/tied", load_file(other / "model.safetensors"), step=4)


def test_a_head_that_the_config_does_not_tie_is_kept(trainer: TrainerClient, tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", "opt", False, *TIES[1][2:], 1.0)
    trainer.import_folder("tests/untied", path).wait(timeout=60)
    assert trainer.model("tests/untied").tensor_count == len(load_file(path / "model.safetensors"))


def test_heads_and_embeddings_that_transformers_ties_have_known_names() -> None:
    """transformers' models declare which parameters are tied."""
    for model_type, _, head, embedding in TIES:
        if model_type == "gpt_neox" and not OF_4:
            continue  # which has another name in memory there
        model = unmapped_model(model_type)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight or model_type == "gpt_neox"
        names = dict(model.named_parameters(remove_duplicate=False))
        assert {head, embedding} <= names.keys()
        assert head_and_embedding(names) == (head, embedding)
    assert head_and_embedding(["lm_head.weight", "a.embed_tokens.weight", "b.embed_tokens.weight"]) is None
    assert head_and_embedding(["lm_head.weight", "model.xwte.weight"]) is None
