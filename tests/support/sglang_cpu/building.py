"""Construction of a model as SGLang's scheduler has it done, in the release that is installed: imported by `ranks`, in
SGLang's environment.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.server_args import ServerArgs

PUBLISHES = find_spec("sglang.srt.distributed.bootstrap") is not None
"""Whether arguments are published and groups made of what was published, as in 0.5.23; in 0.5.15 and older both are
passed around.
"""


class Builder:
    """Builds the models of one rank; the groups of ranks are made with the first one."""

    def __init__(self, rank: int, tp: int, ep: int, port: int) -> None:
        self._rank, self._tp, self._ep, self._port = rank, tp, ep, port
        self._has_groups = False

    def build(self, path: str, shape: dict[str, Any]) -> Any:
        """Construct a model and load it as a server would, from a folder or the service."""
        arguments = ServerArgs(
            model_path=path,
            served_model_name="tiny",
            device="cpu",
            tp_size=self._tp,
            ep_size=self._ep,
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            json_model_override_args=json.dumps(shape),
        )
        config, load_format = (self._published if PUBLISHES else self._passed)(arguments)
        loader = get_model_loader(LoadConfig(load_format=load_format, tp_rank=self._rank), config)
        return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))

    def _published(self, arguments: Any) -> tuple[Any, str]:
        from sglang.srt.distributed import bootstrap
        from sglang.srt.runtime_context import SpawnRanks, get_device, get_model, publish

        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=self._rank, gpu_id=0))
        initialize_moe_config()
        config = ModelConfig.from_server_args(arguments)
        if not self._has_groups:
            device = get_device().device
            bootstrap.init_parallel_runtime(server_args=arguments, device=device, dist_port=self._port)
            self._has_groups = True
        bootstrap.init_layer_runtime(model_config=config)
        return config, get_model().load_format

    def _passed(self, arguments: Any) -> tuple[Any, str]:
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(arguments)
        initialize_moe_config(arguments)
        config = ModelConfig.from_server_args(arguments)
        if not self._has_groups:
            meeting = f"tcp://127.0.0.1:{self._port}"
            init_distributed_environment(self._tp, self._rank, meeting, local_rank=0, backend="gloo")
            initialize_model_parallel(self._tp, self._ep)
            self._has_groups = True
        initialize_dp_attention(arguments, config)
        return config, arguments.load_format
