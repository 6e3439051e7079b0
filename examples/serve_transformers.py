"""transformers model that starts from the newest version and, in place, goes to each one that follows.

    python examples/serve_transformers.py acme/fsdp2

A second argument is the number of versions after which it ends.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch

from weighbridge import EngineClient
from weighbridge.integrations.transformers import from_weighbridge, update

PROMPT = torch.tensor([[5, 17, 99]])


def answers(name: str) -> Iterator[tuple[int, list[int]]]:
    """Number of each version as soon as it is in the store, and the tokens with which it goes on from the prompt."""
    with EngineClient() as client:
        model = None
        for version in client.watch(name, "latest"):
            if model is None:
                model = from_weighbridge(f"{name}@{version.number}")
            else:
                update(model, version.number)  # on any failure the model keeps the version that it has
            prompt = PROMPT.to(model.device)
            said = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                pad_token_id=0,
                max_new_tokens=8,
                do_sample=False,
            )
            yield version.number, said[0].tolist()


if __name__ == "__main__":
    for number, tokens in itertools.islice(answers(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None):
        print(f"version {number}: {tokens}")
