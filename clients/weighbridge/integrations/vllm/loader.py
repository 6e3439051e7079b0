"""Load format ``weighbridge``: a vLLM worker starts from a version, and fetches only its rank's slices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from weighbridge import _lazy as lazy
from weighbridge.follow.engines import stale_drafter_of
from weighbridge.integrations.vllm import releases
from weighbridge.integrations.vllm.model import VllmModel, vllm_rank
from weighbridge.integrations.vllm.settings import Settings

logger = init_logger(f"vllm.plugins.{__name__}")


class WeighbridgeLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is seen as untyped
    """Runs the model's own loader over lazy tensors, and fetches the slices that it uses in one pull."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.load_config = load_config

    def download_model(self, model_config: Any) -> None:
        """Does nothing: each rank fetches its own part when it loads."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the version, lazily, for vLLM's own reloading."""
        settings = self._settings(model_config)
        with settings.source.connect() as client:
            yield from lazy.Source(client, settings.model, settings.version).tensors()

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the version into a newly created model."""
        settings = self._settings(model_config)
        apart = model_config.runner_type == "draft" and not self._is_of_version(model_config)
        if apart and settings.draft:
            settings = settings.of_drafter
        elif apart:
            # vLLM loads a drafter the same way as the policy unless a setting overrides it, but this drafter is not
            # from the service
            plain = replace(self.load_config, load_format="auto", model_loader_extra_config={})
            DefaultModelLoader(plain).load_weights(model, model_config)
            return
        started = time.monotonic()
        rank = vllm_rank(model, get_current_vllm_config(), model_config)
        model_of_rank = cast("VllmModel", rank.engine)
        rank.stale_drafter = stale_drafter_of(settings.stale_drafter)
        model_of_rank.watch_processing()
        found, recording = rank.load(settings.source, settings.version)
        if recording is None:  # the loader runs once, over tensors that are fetched when it copies them
            loaded = model.load_weights(found.tensors())
            if loaded is not None:
                releases.track(self, model, loaded, quantized=model_config.quantization is not None)
        elif recording.unrecorded:
            model.load_weights(found.tensors(recording.unrecorded))
        rank.close()
        model_of_rank.reserve(recording, settings.card_share)
        nbytes = (recording.nbytes if recording is not None else 0) + found.fetched_bytes
        logger.info("%s: loaded %.1f MB in %.2f s", found.version, nbytes / 1e6, time.monotonic() - started)

    @staticmethod
    def _is_of_version(model_config: Any) -> bool:
        """Whether the policy's version contains the weights of a drafter, or the drafter has its own load settings."""
        speculative = get_current_vllm_config().speculative_config
        if speculative is None or speculative.draft_load_config is not None:
            return True
        return bool(model_config.model == speculative.target_model_config.model)

    def _settings(self, model_config: Any) -> Settings:
        return Settings.of(self.load_config.model_loader_extra_config or {}, model_config.model)
