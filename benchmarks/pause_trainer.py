"""Trainer of `benchmarks.pause`: holds a model on its device, and runs the commands that it receives.

Each line of its standard input is a command with its arguments; each answer is a line of JSON.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.pause_models import MODEL, checksum, rank_parts, shapes_of
from weighbridge import PushHandle, Retention, TrainerClient


class Trainer:
    """The model, and its way to the service.

    Args:
        server: address of the service.
        folder: folder of the model's files.
        device: device of the tensors.
    """

    def __init__(self, server: str, folder: str, device: str) -> None:
        self._config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        self._device = device
        if device == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=device)
            for name, shape in shapes_of(self._config).items()
        }
        self._client = TrainerClient(server)
        self._client.register_model(MODEL, folder, tensors=self._tensors, weight_map=False)
        self._client.set_retention(MODEL, Retention(keep_last=3))  # or a long run fills the disk
        self._handle: PushHandle | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def make(self, step: str) -> dict[str, Any]:
        """New random weights, and nothing else."""
        generator = torch.Generator(self._device).manual_seed(int(step))
        for tensor in self._tensors.values():
            tensor.normal_(std=0.02, generator=generator)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {}

    def push(self, step: str) -> dict[str, Any]:
        """Push new weights, once the version before is in the store: how long the trainer was held, and how long it
        took until they were ready.
        """
        if self._handle is not None:
            self._handle.wait("durable", timeout=600)  # so that no two versions wait for the store at once
        return self.hurry(step)

    def hurry(self, step: str) -> dict[str, Any]:
        """`push`, wherever the version before is."""
        self.make(step)
        begun = time.monotonic()
        self._handle = self._client.push_state_dict(MODEL, self._tensors, step=int(step))
        held = time.monotonic() - begun
        version = self._handle.wait("ready", timeout=600)
        ready = time.monotonic() - begun
        return {"version": version.number, "begun": begun, "held": held, "ready": ready}

    def durable(self) -> dict[str, Any]:
        """Wait until what was pushed is in the store."""
        assert self._handle is not None
        return {"version": self._handle.wait("durable", timeout=600).number}

    def ipc(self, step: str) -> dict[str, Any]:
        """Handles of new weights on the card, as vLLM's transfer engine ``ipc`` sends them."""
        from torch.multiprocessing.reductions import reduce_tensor

        self.make(step)
        begun = time.monotonic()
        card = str(torch.cuda.get_device_properties(0).uuid)
        reduced: Any = reduce_tensor
        handles = [{card: reduced(tensor)[1]} for tensor in self._tensors.values()]
        update = {
            "names": list(self._tensors),
            "dtype_names": ["bfloat16"] * len(self._tensors),
            "shapes": [list(tensor.shape) for tensor in self._tensors.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
        return {"begun": begun, "held": time.monotonic() - begun, "update": update}

    def sglang(self, step: str) -> dict[str, Any]:
        """Handles of new weights, as SGLang's ``update_weights_from_tensor`` takes them."""
        from sglang.srt.utils import MultiprocessingSerializer

        self.make(step)
        begun = time.monotonic()
        serialised: Any = MultiprocessingSerializer.serialize
        return {"begun": begun, "payload": serialised(list(self._tensors.items()), output_str=True)}

    def folder(self, step: str, path: str) -> dict[str, Any]:
        """Write new weights into a folder, for vLLM's ``reload_weights``."""
        self.make(step)
        begun = time.monotonic()
        there = Path(path)
        there.mkdir(parents=True)
        (there / "config.json").write_text(json.dumps(self._config))
        save_file(self._tensors, there / "model.safetensors", {"format": "pt"})
        return {"begun": begun, "held": time.monotonic() - begun}

    def checksums(self, ranks: str = "1") -> dict[str, int]:
        """Checksums of all parameters, as so many workers of the engine cut and fuse them."""
        parts = rank_parts(self._config, self._tensors, int(ranks))
        return {name: checksum(tensor) for name, tensor in parts}


def main(server: str, folder: str, device: str) -> None:
    """Do what is asked, until the standard input ends."""
    trainer = Trainer(server, folder, device)
    print(json.dumps({"bytes": trainer.nbytes}), flush=True)
    for line in sys.stdin:
        what, *arguments = line.split()
        try:
            found = getattr(trainer, what)(*arguments)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
