"""Online quantisation of linear layers for a vLLM that has none for CPUs: made as vLLM's own for GPUs is, from what
torch has.

Weights are loaded to layers without storage; each layer is quantised per tensor when it is complete, and computes with
the transposed weight.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

NAME = "tests_fp8"
special: dict[str, str] = {}
"""Methods of other classes than `OnlineFp8`, by the end of layers' names."""


class Kernel:
    """Something that a method keeps, and that processing writes to, as vLLM's kernels are."""

    logical_output_size: int | None = None

    def process(self, layer: torch.nn.Module) -> None:
        self.logical_output_size = layer.weight.shape[1]


class OnlineFp8(LinearMethodBase):  # type: ignore[misc]  # vLLM is seen as untyped
    """Per-tensor fp8, quantised while weights are loaded."""

    uses_meta_device = True

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=extra.get("weight_loader")),
        )
        self.kernel = Kernel()
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer.input_scale = None
        scale = self.reduced((layer.weight.abs().max().float() / 448).reshape(1))
        replace_parameter(layer, "weight", (layer.weight / scale).to(torch.float8_e4m3fn).t().data)
        replace_parameter(layer, "weight_scale", scale.data)
        self.kernel.process(layer)
        layer._already_called_process_weights_after_loading = True

    def reduced(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, (layer.weight.float() * layer.weight_scale).t().to(x.dtype), bias)


class Reducing(OnlineFp8):
    """All tensor-parallel ranks have one scale, as in vLLM's own method from 0.32 on."""

    def reduced(self, scale: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(scale, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
        return scale


class Growing(OnlineFp8):
    """Keeps state: each layer that it has processed."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        self.count = getattr(self, "count", 0) + 1


@register_quantization_config(NAME)
class Config(QuantizationConfig):  # type: ignore[misc]
    """Config of this quantization."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        names = [kind for end, kind in special.items() if prefix.endswith(end)]
        return globals()[names[0]]() if names else OnlineFp8()
