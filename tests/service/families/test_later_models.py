"""Do models that only transformers 5 knows have the names, and compute what its own models do?

They are made of parts of transformers 4, and so are the shapes of their maps; transformers' own are the independent
answer. Run by ``make test-transformers``, which has an environment with the newest.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.reference import LATER, in_files, tiny_config, tiny_model
from weighbridge_service.families import family_of

PYTHON = os.environ.get("WEIGHBRIDGE_TRANSFORMERS_PYTHON")
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model, loading = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], output_loading_info=True, attn_implementation="eager", dtype=torch.float32)
assert not any(loading.values()), loading
with torch.no_grad():
    torch.save(model.eval()(torch.load(sys.argv[2])).logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
"""
TOLERANCE = 1e-4


@pytest.mark.skipif(PYTHON is None, reason="make test-transformers names an environment with other transformers")
@pytest.mark.parametrize("family", LATER)
def test_a_model_of_parts_of_transformers_4_is_that_of_transformers_5(tmp_path: Path, family: str) -> None:
    config = tiny_config(family, tied=False)
    model = tiny_model(config, seed=1)
    ids = torch.randint(120, (2, 12), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(ids).logits
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    torch.save(ids, tmp_path / "ids.pt")
    found, again = tmp_path / "logits.pt", tmp_path / "again"
    subprocess.run([str(PYTHON), "-W", "ignore", "-c", LOAD, tmp_path, tmp_path / "ids.pt", found, again], check=True)
    assert (torch.load(found) - logits).abs().max() < TOLERANCE
    saved = load_file(again / "model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in weights.items()}


@pytest.mark.parametrize("family", LATER)
@pytest.mark.parametrize("tied", [False, True])
def test_the_map_has_the_tensors_of_such_a_model(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    shapes = family_of(fields := json.loads(config.to_json_string()))(fields).hugging_face_shapes()
    model = tiny_model(config, seed=1)
    state = in_files(model, model.state_dict())
    wanted = {n: tuple(t.shape) for n, t in state.items() if not (tied and n == "lm_head.weight")}
    assert shapes == wanted
