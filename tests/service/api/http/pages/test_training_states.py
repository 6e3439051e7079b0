"""Do training states have pages as weights have?"""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import torch

from tests.service.api.http.pages.conftest import Place
from weighbridge import TrainerClient

MODEL = "acme/tiny"


def test_the_training_states_of_a_model_are_shown_beside_it(place: Place, tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    with TrainerClient(place.running.address) as trainer, httpx.Client(base_url=place.url) as http:
        (tmp_path / "config.json").write_text("{}")
        trainer.register_model(MODEL, tmp_path, tensors=module, weight_map=False)
        pushed = trainer.push_state_dict(MODEL, module, step=7, optimizer=optimizer, rank=0, world_size=1)
        pushed.wait(timeout=60)
        assert "training states" in http.get(f"/models/{MODEL}").text
        states = http.get(f"/models/{MODEL}:training").text
        assert "durable" in states
        assert f'href="/models/{MODEL}:training/versions/1"' in states
        version = http.get(f"/models/{MODEL}:training/versions/1").text
        assert "exp_avg_sq" in version, "the moments of AdamW are tensors of the state"
        assert http.get(f"/models/{MODEL}:training/versions/1?q=exp_avg").text.count("distribution.svg") == 4
