"""The load format ``weighbridge``: a vLLM worker starts from a version, and fetches only what its rank holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from weighbridge import lazy
from weighbridge.integrations.vllm import layers, origins, reading
from weighbridge.integrations.vllm.settings import Settings

logger = init_logger(f"vllm.plugins.{__name__}")


class WeighbridgeLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is seen as untyped
    """Runs the model's own loader over lazy tensors, and brings what it takes in one pull."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.load_config = load_config

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download: each rank fetches its own part when it loads."""

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the version, lazily: for vLLM's own reloading."""
        settings = self._settings(model_config)
        with settings.connect() as client:
            yield from lazy.Source(client, settings.model, settings.version).tensors()

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Bring the version to a model that has just been made."""
        settings = self._settings(model_config)
        started = time.monotonic()
        with settings.connect() as client:
            source = lazy.Source(client, settings.model, settings.version)
            if layers.quantizes_while_loading(model):
                recording, nbytes = None, self._fetch_while_loading(model, model_config, source)
            else:
                recording = reading.record(model, model_config, client, source)
                targets = layers.tensors_of(model)
                update = recording.update(client, settings.model, source.version.number)
                update.fill_all(targets)
                update.close()
                if recording.unrecorded:
                    model.load_weights(source.tensors(recording.unrecorded))
                nbytes = update.nbytes + source.fetched_bytes
        origins.remember(model, origins.Origin(settings, source.version.number, recording))
        logger.info(
            "%s@%d: loaded %.1f MB in %.2f s",
            settings.model, source.version.number, nbytes / 1e6, time.monotonic() - started,
        )  # fmt: skip

    def _fetch_while_loading(self, model: Any, model_config: Any, source: lazy.Source) -> int:
        """Run the loader once, on tensors that are fetched when it copies them."""
        loaded = model.load_weights(source.tensors())
        if loaded is not None:
            self.track_weights_loading(model, loaded, quantized=model_config.quantization is not None)
        return source.fetched_bytes

    def _settings(self, model_config: Any) -> Settings:
        return Settings.read(self.load_config.model_loader_extra_config or {}, model_config.model)
