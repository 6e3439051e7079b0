"""Options of ``from_pretrained`` that `from_weighbridge` accepts: some configure the config or the model, some have no
effect, others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weighbridge._core import dtypes
from weighbridge.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_REFUSED = {
    "revision": "name the version behind the model: namespace/name@version",
    "subfolder": "a version is the folder of one model: register the contents of the folder as a model of its own",
    "variant": "register the variant as a model of its own",
    "gguf_file": "register the model's safetensors files",
    "from_tf": "save the model as safetensors",
    "from_flax": "save the model as safetensors",
    "state_dict": "attach() takes a model that has its weights already",
    "load_in_8bit": "load it from the service's Hugging Face endpoint, with HF_ENDPOINT",
    "load_in_4bit": "load it from the service's Hugging Face endpoint, with HF_ENDPOINT",
    "max_memory": "name one device in device_map, or spread the model over ranks with tp_plan='auto'",
    "offload_folder": "name one device in device_map, or spread the model over ranks with tp_plan='auto'",
    "offload_buffers": "name one device in device_map, or spread the model over ranks with tp_plan='auto'",
    "ignore_mismatched_sizes": "give a config whose sizes are the version's",
    "output_loading_info": "strict=True names what is missing or left over",
    "adapter_kwargs": "attach the adapter to the model that this returns",
}
_OF_DOWNLOADS = frozenset(
    {
        *(
            "cache_dir",
            "force_download",
            "local_files_only",
            "token",
            "use_auth_token",
            "proxies",
            "resume_download",
            "mirror",
            "code_revision",
        ),
        *("use_safetensors", "weights_only", "low_cpu_mem_usage", "offload_state_dict"),
    }
)
_SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")
_FIX_DEVICE = "name one, such as 'cuda:0', or spread the model over ranks with tp_plan='auto'"


def supported(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without the download options, which have no effect here.

    Raises:
        InvalidArgument: an option requests something that versions of the service do not have; names the option.
        FailedPrecondition: an option requests quantised weights.
    """
    for name, fix in _REFUSED.items():
        if options.get(name):
            raise InvalidArgument(f"from_weighbridge does not support {name}={options[name]!r:.80}", fix=fix)
    check_not_quantised("the model", options.get("quantization_config"))
    return {
        name: value
        for name, value in options.items()
        if name not in _REFUSED and name not in _OF_DOWNLOADS and name != "quantization_config"
    }


def check_not_quantised(what: object, quantization: object) -> None:
    """Raise FailedPrecondition if a model is quantised, or is to be."""
    if quantization:
        raise FailedPrecondition(
            f"{what} is quantised, or is to be: transformers would repack it",
            fix="load it from the service's Hugging Face endpoint, with HF_ENDPOINT",
        )


def dtype_option(dtype: Any, torch_dtype: Any) -> Any:
    """Dtype for ``from_pretrained``.

    The newer of the two argument names takes precedence; without either, the config's dtype is used.
    """
    asked = torch_dtype if dtype is None else dtype
    return dtypes.parse(asked).torch if isinstance(asked, str) and asked != "auto" else asked or "auto"


def configured(folder: str, options: Mapping[str, Any]) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The configuration in a folder, with the options that are its attributes applied, and the remaining options: the
    same split as in ``from_pretrained``.
    """
    from transformers import AutoConfig

    # some releases drop the attention from the configuration, so the model receives it as well
    apart = {name: options[name] for name in ("attn_implementation", "trust_remote_code") if name in options}
    remote = {"trust_remote_code": apart["trust_remote_code"]} if "trust_remote_code" in apart else {}
    config, rest = AutoConfig.from_pretrained(
        folder,
        return_unused_kwargs=True,
        **{name: value for name, value in options.items() if name not in apart},
        **remote,
    )
    return config, {**{name: value for name, value in rest.items() if name in options}, **apart}


def single_device(device_map: Any, nbytes: int) -> torch.device | None:
    """The single device that a ``device_map`` names or resolves to.

    ``auto`` resolves to the only accelerator, or to the CPU if there is none.

    Args:
        device_map: as for ``from_pretrained``.
        nbytes: of the model.

    Raises:
        InvalidArgument: it spreads the model over several.
    """
    if isinstance(device_map, str) and device_map in _SPREADING:
        return _only_device(device_map, nbytes)
    if isinstance(device_map, Mapping) and len(set(device_map.values())) == 1:
        (device_map,) = set(device_map.values())
    if device_map is None or isinstance(device_map, torch.device):
        return device_map
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device_map={device_map!r} is not a single device", fix=_FIX_DEVICE) from error


def _only_device(device_map: str, nbytes: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count > 1:
        raise InvalidArgument(f"device_map={device_map!r} would spread the model over {count} devices", fix=_FIX_DEVICE)
    device = torch.device(accelerator.type, 0)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and nbytes > free:
        raise InvalidArgument(
            (
                f"device_map={device_map!r} would leave a part of the model in host memory: it has "
                f"{nbytes} bytes, and {free} are free on {device}"
            ),
            fix=_FIX_DEVICE,
        )
    return device
