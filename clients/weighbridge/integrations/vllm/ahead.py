"""Processing of a staged version before it is applied: layer by layer, in parallel with the engine, into the memory
where the layer's weights were staged.

Other layers are processed in the pause. Observation, not a list of names, decides which; the log gives the reason once
for each kind of layer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from weighbridge import _lazy as lazy
from weighbridge.integrations.vllm import layers
from weighbridge.integrations.vllm.releases import LEFT_IN_PLACE, NOT_MADE_ANEW, is_deferred
from weighbridge.integrations.vllm.shadows import Shadows, Subject
from weighbridge.integrations.vllm.watching import Tensors, Unsuitable, own_tensors, storage_of
from weighbridge.integrations.vllm.wrapped import named_layers

log = init_logger(f"vllm.plugins.{__name__}")

_SPARE_BYTES = 100_000_000
"""Bytes of GPU memory, in addition to the reserved ones, that the results of one layer may occupy temporarily."""

_TOO_LARGE = "its processed weights do not fit where its weights were staged"


class Ahead:
    """Layers of one model that are processed ahead.

    Attributes:
        left: kinds of layers that were left to the pause, with the reason for the first layer of each kind.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._shadows = Shadows()
        self.left: dict[str, str] = {}
        self._stream: torch.cuda.Stream | None = None
        """The allocator caches memory per stream, so a new stream each time would use more and more memory."""
        self._room_bytes = 0
        self._room: torch.Tensor | None = None
        """Memory for the results of one layer; returned to the allocator while they are computed."""

    def reserve(self, device: torch.device) -> int:
        """Reserve GPU memory for the processing results of any single layer. Returns the number of bytes."""
        quantized = (each for each in self._model.modules() if getattr(_method(each), "uses_meta_device", False))
        self._room_bytes = max((_nbytes_of(layer) for layer in quantized), default=0)
        with lazy.on_stream_of(device, self._own_stream(device)):
            self._take_room(device)
        return self._room_bytes

    def take_over(self, before: Ahead) -> None:
        """Take over the memory that was reserved for another model, all of whose layers this model contains."""
        self._stream, self._room_bytes, self._room = before._stream, before._room_bytes, before._room
        before._room = None

    def process(self, update: lazy.Update, recording: lazy.Recording, leave: Container[torch.nn.Module]) -> int:
        """Process those staged layers of a version that can be processed ahead. Returns their number.

        Args:
            update: the staged, complete update.
            recording: the recording that it was made from.
            leave: layers that processing does not change.
        """
        subjects = [
            (prefix, layer)
            for prefix, layer in named_layers(self._model)
            if _method(layer) is not None and layer not in leave and not is_deferred(layer)
        ]
        staged = next(iter(update.staged.values()), None)
        if not subjects or staged is None:
            return 0
        begun, count = time.monotonic(), 0
        owners = Counter(
            storage
            for each in self._model.modules()
            for storage in {storage_of(tensor) for tensor in own_tensors(each).values()} - {0}
        )
        with lazy.on_stream_of(staged.device, self._own_stream(staged.device)), torch.no_grad():
            self._room = None
            try:
                for prefix, layer in subjects:
                    try:
                        count += self._process(update, recording, owners, prefix, layer)
                    except Unsuitable as error:
                        self._say(layer, str(error))
            finally:
                self._take_room(staged.device)
        log.info(
            "%s: %d of %d layers processed before the pause, in %.3f s",
            update.version, count, len(subjects), time.monotonic() - begun,
        )  # fmt: skip
        return count

    def made(self, update: lazy.Update) -> Tensors:
        """The live tensors that have a processed counterpart, by full name."""
        if not update.replaced:
            return {}
        return {
            layers.full_name(prefix, name): tensor
            for prefix, layer in named_layers(self._model)
            for name, tensor in own_tensors(layer).items()
            if layers.full_name(prefix, name) in update.made
        }

    def _process(
        self,
        update: lazy.Update,
        recording: lazy.Recording,
        owners: Counter[int],
        prefix: str,
        layer: torch.nn.Module,
    ) -> bool:
        own, remade = own_tensors(layer), layers.as_made(layer)
        full = {name: layers.full_name(prefix, name) for name in own.keys() | remade.keys()}
        filled = {name for name, each in full.items() if each in recording.targets}
        if not filled:
            return False  # it belongs to another layer, and this one has a part of it
        if in_place := sorted(filled & LEFT_IN_PLACE):
            raise Unsuitable(f"{in_place[0]} is filled in place")
        given = remade.keys() - NOT_MADE_ANEW | filled
        kept = frozenset(own.keys() & NOT_MADE_ANEW - given)
        if missing := sorted(given - filled):
            raise Unsuitable(f"a version has nothing for {missing[0]}")
        if missing := sorted(name for name in given if full[name] not in update.staged):
            raise Unsuitable(f"not all of it fits into the reserved memory ({missing[0]})")
        subject = Subject(
            layer,
            _method(layer),
            {name: update.staged[full[name]] for name in given},
            kept,
            frozenset(name for name in kept if owners[storage_of(own[name])] == 1),
            layers.dressed,
            frozenset(name for name in given if layers.is_buffer(layer, name)),
        )
        if shared := sorted(name for name, each in subject.live.items() if owners[storage_of(each)] > 1):
            raise Unsuitable(f"another layer shares its {shared[0]}")
        if sum(map(_nbytes, subject.live.values())) > sum(map(_nbytes, subject.loaded.values())):
            raise Unsuitable(_TOO_LARGE)
        made = self._shadows.process(subject, set(owners), self._room_bytes + _SPARE_BYTES)
        if not update.replace([full[name] for name in given], {full[name]: each for name, each in made.items()}):
            raise Unsuitable(_TOO_LARGE)
        return True

    def _say(self, layer: torch.nn.Module, why: str) -> None:
        kind = type(layer).__name__
        if kind not in self.left:
            self.left[kind] = why
            log.info("%s: processed in the pause: %s", kind, why)

    def _own_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        return self._stream

    def _take_room(self, device: torch.device) -> None:
        if not self._room_bytes:
            return
        try:
            self._room = torch.empty(self._room_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            log.warning(
                "%.1f GB for the processing of new versions are used by something else",
                self._room_bytes / 1e9,
            )


def _method(layer: torch.nn.Module) -> Any:
    """The method with which vLLM processes a layer after loading; None if there is none."""
    found = getattr(layer, "quant_method", None)
    return found if isinstance(found, QuantizeMethodBase) else None


def _nbytes_of(layer: torch.nn.Module) -> int:
    return sum(map(_nbytes, own_tensors(layer).values()))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes
