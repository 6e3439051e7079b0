"""Model of one rank of vLLM, as `weighbridge.integrations.engine_rank` requires it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from weighbridge import _lazy as lazy
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, Ranks
from weighbridge.integrations.engine_rank.drafting import PREFIX
from weighbridge.integrations.engine_rank.fitting import unseen
from weighbridge.integrations.engine_rank.model import EngineModel, Rest
from weighbridge.integrations.engine_rank.rank import EngineRank, known_rank, rank_of
from weighbridge.integrations.vllm import NAME, layers
from weighbridge.integrations.vllm.applying import Applier
from weighbridge.integrations.vllm.kept_results import check_updatable
from weighbridge.integrations.vllm.wrapped import check_wrapped, name_before, unwrapped

logger = init_logger(f"vllm.plugins.{__name__}")


class VllmModel(EngineModel):
    """A model whose layers may compute with repacked or derived weights.

    Args:
        model: vLLM's.
        vllm_config: the engine's configuration.
        model_config: vLLM's configuration of this model; None for the one in the engine's configuration.
    """

    kind = "vllm"

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any = None) -> None:
        super().__init__(model)
        self._vllm_config = vllm_config
        self._model_config = model_config or vllm_config.model_config
        self.applier = Applier(model, self._model_config)
        self._share = 0.0
        if self._is_draft:  # a drafter is not an engine
            self.kind = ""

    @property
    def _is_draft(self) -> bool:
        return getattr(self._model_config, "runner_type", "") == "draft"

    def join(self, drafter: torch.nn.Module, name: str = "the drafter") -> None:
        """Also fill the drafter, and reserve for it the same share of GPU memory as for the model."""
        super().join(drafter, name)
        self._apply_by(Applier(self.model, self._model_config, self.applier, applier_of(drafter)))
        if self.place is not None:
            own = [tensor for name, tensor in self.targets().items() if name.startswith(PREFIX)]
            nbytes = self.place.nbytes + int(self._share * lazy.staging_bytes(lazy.Shape.of(tensor) for tensor in own))
            device, self.place = self.place.device, None  # released before more is allocated
            self.place = lazy.StagingPlace(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def part(self) -> None:
        """Stop filling the drafter."""
        super().part()
        self._apply_by(Applier(self.model, self._model_config, self.applier))

    def _apply_by(self, applier: Applier) -> None:
        applier.ahead.take_over(self.applier.ahead)
        self.applier = applier

    @property
    def ranks(self) -> Ranks:
        """All workers of this engine, over their own group on CPU."""
        return ProcessGroup(get_world_group().cpu_group)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration, as vLLM read it; None for a drafter, because vLLM rewrites its
        configuration.
        """
        return None if self._is_draft else self._model_config.hf_config

    def configuration(self) -> str:
        """vLLM's release, the model's configuration and quantization, the parallelism, and this rank."""
        model, parallel = self._model_config, self._vllm_config.parallel_config
        known = {
            "vllm": vllm.__version__,
            "rank": get_world_group().rank_in_group,
            "config": model.hf_config.to_dict(),
            "quantization": model.quantization,
            "parallel": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.data_parallel_size,
                parallel.data_parallel_rank,
                parallel.enable_expert_parallel,
                parallel.enable_eplb,
                str(parallel.expert_placement_strategy),
            ],
        }
        if self.drafter is not None:
            speculative = self._vllm_config.speculative_config
            known["drafter"] = [
                type(self.drafter).__qualname__,
                speculative.draft_model_config.hf_config.to_dict(),
                speculative.draft_tensor_parallel_size,
            ]
        return json.dumps(known, sort_keys=True, default=str)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers, except those of attention layers."""
        return layers.tensors_of(self.model)

    @contextmanager
    def storageless(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """The tensors in the form that the loader expects in a newly created model."""
        with (
            set_current_vllm_config(self._vllm_config),
            unwrapped(self.model),
            layers.without_storage(self.model, self._model_config) as targets,
        ):
            yield targets

    def spare(self, parameter: torch.Tensor) -> int:
        """Padding, as vLLM counts it; the whole parameter if weights are quantized, because vLLM knows which scales a
        checkpoint may omit.
        """
        if self._model_config.quantization is not None:
            return parameter.numel()
        return parameter.numel() - int(getattr(parameter, "weight_loader_numel", parameter.numel()))

    def record_first(self, source: lazy.Source) -> lazy.Recording | None:
        """Record a newly created model; None if vLLM quantizes weights while it loads them."""
        if layers.quantizes_while_loading(self.model):
            return None
        return self.record_on(self.targets(), source, None)

    def check(self, recording: lazy.Recording) -> None:
        """Refuse a model if vLLM has renamed its layers, and an engine that would continue to use results of old
        weights.

        The layout of parameters is checked when layers are recreated.
        """
        check_updatable(self._vllm_config)
        check_wrapped(self.model)
        self.applier.check(recording)

    def live(self, recording: lazy.Recording) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
        """Tensors of layers that contain the loaded values; others are repacked, quantized or derived."""
        seen = self.applier.live(recording)
        made = sorted(self.applier.also_made(recording) & seen.keys())
        also = dict.fromkeys(
            made, "it was compared, but the engine also computes with a tensor that is derived from it"
        )
        others = {
            name: why
            for name, why in unseen(self.model, recording, seen).items()
            if name == (before := name_before(name)) or before not in recording.targets
        }
        return seen, {**others, **also}

    def computed_with(self) -> Mapping[str, torch.Tensor]:
        """All tensors, and the weights of vLLM's CPU kernels that are packed into hidden storage."""
        seen = {name_before(name): tensor for name, tensor in super().computed_with().items()}
        return {**seen, **layers.packed_weights(self.model)}

    def hidden(self) -> Mapping[str, str]:
        """Weights that vLLM's CPU kernels have packed into hidden storage, and that cannot be recovered from
        products.
        """
        packed = layers.packed_weights(self.model).keys()
        gone = sorted(layers.names_loaded(self.model) - self.computed_with().keys())
        return dict.fromkeys(
            (name for name in gone if f"{name}{layers.PACKED}" not in packed),
            "its kernel has packed it into hidden storage",
        )

    def load_again(self, source: lazy.Source) -> None:
        """Through vLLM's layerwise reloading, as ``reload_weights`` does."""
        with set_current_vllm_config(self._vllm_config), unwrapped(self.model), torch.no_grad():
            self.applier.load_again(source)

    def watch_processing(self) -> None:
        """Observe, from now on, which layers vLLM's processing leaves unchanged."""
        self.applier.watch_processing()

    def reserve(self, recording: lazy.Recording | None, share: float | None) -> None:
        """Reserve GPU memory for staging versions before they are applied. Must be called while vLLM measures the
        model's memory, so that the KV cache receives the rest.

        Args:
            recording: recording of the loader; None if the loader could not be recorded.
            share: fraction of the parameters' bytes; None for all of them if half of the GPU memory that vLLM may use
                remains free, otherwise for none.
        """
        model, devices = (
            self._model_config,
            {tensor.device for tensor in self.targets().values() if not tensor.is_meta},
        )
        transfer = self._vllm_config.weight_transfer_config
        takes_none = self._is_draft or transfer is None or transfer.backend != NAME
        if takes_none or {device.type for device in devices} != {"cuda"} or len(devices) > 1:
            return
        (device,) = devices
        shapes = layers.shapes_loaded(self.model) if recording is None else recording.targets.values()
        nbytes = lazy.staging_bytes(shapes)
        asleep = bool(getattr(model, "enable_sleep_mode", False))
        usable = (
            torch.cuda.get_device_properties(device).total_memory
            * self._vllm_config.cache_config.gpu_memory_utilization
        )
        if share is None:
            share = float(not asleep and torch.cuda.memory_allocated(device) + nbytes <= usable / 2)
        elif share and asleep:
            raise FailedPrecondition(
                "an engine that may sleep cannot reserve GPU memory for new versions",
                fix="leave card_share out, or start the engine without --enable-sleep-mode",
            )
        nbytes, self._share = int(nbytes * share), share
        if not nbytes:
            return
        self.place = lazy.StagingPlace(torch.empty(nbytes, dtype=torch.uint8, device=device))
        if recording is None:
            nbytes += self.applier.ahead.reserve(device)
        logger.info(
            "%.1f GB of GPU memory are reserved for new versions (card_share=%g)%s",
            nbytes / 1e9,
            share,
            self._tokens_in(nbytes),
        )

    def process_staged(self, update: lazy.Update, recording: lazy.Recording) -> int:
        """Quantise, or do whatever else vLLM does after loading, outside the layers that compute."""
        return 0 if recording.unrecorded else self.applier.process_staged(update, recording)

    def _tokens_in(self, nbytes: int) -> str:
        """Message about the number of KV cache tokens that would fit into these bytes; empty for models without a KV
        cache.
        """
        model, parallel = self._model_config, self._vllm_config.parallel_config
        try:
            layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
            of_one = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
            return f", room for about {nbytes // of_one} tokens of the KV cache"
        except (AttributeError, TypeError, ValueError, ZeroDivisionError, NotImplementedError):
            return ""

    def fill(self, update: lazy.Update, recording: lazy.Recording, rest: Rest) -> None:
        """Fill through vLLM's layerwise reloading if kernels compute with tensors other than those that a loader
        fills.
        """
        with set_current_vllm_config(self._vllm_config), unwrapped(self.model):
            self.applier.apply(update, recording, rest)


def applier_of(model: torch.nn.Module) -> Applier | None:
    """The applier of a model that this process loaded from the service; None for any other model."""
    rank = known_rank(model)
    return rank.engine.applier if rank is not None and isinstance(rank.engine, VllmModel) else None


def vllm_rank(model: torch.nn.Module, vllm_config: Any, model_config: Any = None) -> EngineRank:
    """The rank of a model of this worker; the arguments are those of `VllmModel`."""
    return rank_of(model, VllmModel(model, vllm_config, model_config))
