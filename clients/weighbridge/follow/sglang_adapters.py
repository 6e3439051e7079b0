"""Adapters in a running SGLang server.

Each is named by its version, and is loaded only on the base version that it names.

SGLang reads ``r``, ``lora_alpha`` and ``target_modules`` of a config and ignores the rest. So adapters with settings
that it would ignore are refused here, before anything is loaded.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weighbridge._core.file_names import ADAPTER_CONFIG
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.shortening import shown
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.adapters import LoadedAdapter
from weighbridge.follow.answers import EngineApi, NoRoute, understood
from weighbridge.follow.engines import EngineFailed, Serving

if TYPE_CHECKING:
    import torch

    from weighbridge._clients.engine import EngineClient

TENSORS, FILES = "tensors", "files"
"""Ways to transfer an adapter to the engine: in the request, or through a folder that both sides can access."""
_FROM_TENSORS, _FROM_FOLDER, _UNLOAD = (
    "/load_lora_adapter_from_tensors",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
_LEFT_OUT: Mapping[str, str] = {
    "use_rslora": "it would scale by lora_alpha / r",
    "use_dora": "it has no DoRA",
    "rank_pattern": "it takes one rank for all modules",
    "alpha_pattern": "it takes one alpha for all modules",
    "modules_to_save": "it does not replace whole modules",
    "target_parameters": "it adapts only modules",
    "trainable_token_indices": "it does not change rows of embeddings",
    "layer_replication": "it does not repeat layers",
    "lora_bias": "it adds no biases",
    "fan_in_fan_out": "it does not transpose weights",
    "use_qalora": "it has no QA-LoRA",
    "arrow_config": "it does not route between adapters",
    "alora_invocation_tokens": "it computes with the adapter from the first token on",
}
"""Config entries that change an adapter's computation and that SGLang ignores."""
_SERVED = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
_FIX = "push the merged model under a name of its own (docs/recipes/lora.md), or serve this adapter with vLLM or peft"


class Server(Protocol):
    """A running SGLang server, such as `weighbridge.follow.sglang.SglangServer`.

    Attributes:
        url: URL of its HTTP API.
        model: ``namespace/name`` of the served model.
        api: its HTTP API.
    """

    url: str
    model: str
    api: EngineApi

    def serving(self) -> Serving:
        """State of the engine, as all ranks report it."""
        ...


def unserved(
    config: Mapping[str, Any], tensors: Collection[str], base: Collection[str], engine: Mapping[str, Any]
) -> Iterator[str]:
    """The reasons why an SGLang server cannot serve an adapter; empty if it can.

    Args:
        config: the adapter's config.
        tensors: names of its tensors.
        base: names of the tensors of its base.
        engine: the server's settings, as ``/server_info`` reports them.
    """
    if config.get("peft_type") != "LORA":
        yield f"its peft_type is {shown(config.get('peft_type'))}, and SGLang serves only LORA"
        return
    for entry, why in _LEFT_OUT.items():
        if config.get(entry):
            yield f"{entry} is {shown(config[entry])}, and SGLang ignores it: {why}"
    if config.get("bias", "none") != "none":
        yield f"bias is {shown(config['bias'])}, and SGLang adds no biases"
    others = [name for name in tensors if not name.endswith(_SERVED)]
    if others:
        yield f"SGLang has no place for {counted(len(others), 'tensor')}: {', '.join(first_lines(others))}"
    yield from _cut_layers(tensors, base)
    rank, most = config.get("r"), engine.get("max_lora_rank")
    if isinstance(most, int) and isinstance(rank, int) and rank > most:
        yield f"its rank is {rank}, and the server was started with --max-lora-rank {most}"
    modules, taken = config.get("target_modules"), engine.get("lora_target_modules")
    if isinstance(modules, str) and modules != "all-linear":
        yield "target_modules is a regular expression, and SGLang requires names of modules"
    elif isinstance(modules, list) and isinstance(taken, list) and "all" not in taken:
        missing = sorted({str(each).rpartition(".")[2] for each in modules} - set(taken))
        if missing:
            yield (
                f"it changes {', '.join(missing)}, and the server was started with "
                f"--lora-target-modules {' '.join(sorted(taken))}"
            )


def _cut_layers(tensors: Iterable[str], base: Iterable[str]) -> Iterator[str]:
    """Layers that SGLang merges into one and that the adapter changes only in part: SGLang fails on that part or drops
    it.
    """
    projections: defaultdict[str, set[str]] = defaultdict(set)
    for name in tensors:
        module, found, _ = name.partition(".lora_")
        if found:
            layer, _, projection = module.rpartition(".")
            projections[layer].add(projection)
    gated = any(".gate_proj." in name or ".gate_up_proj" in name for name in base)
    for layer, there in projections.items():
        if there & {"q_proj", "k_proj", "v_proj"} and not there >= {"q_proj", "v_proj"}:
            yield (
                f"it changes {', '.join(sorted(there & {'q_proj', 'k_proj', 'v_proj'}))} alone in "
                f"{layer}, and SGLang requires q_proj and v_proj together"
            )
            return
        if gated and "up_proj" in there and "gate_proj" not in there:
            yield f"it changes up_proj without gate_proj in {layer}, and SGLang drops that"
            return


def load(
    server: Server, client: EngineClient, adapter: str, version: str | int | None, folder: Path | None
) -> LoadedAdapter:
    """Load an adapter's version into a server; see `SglangServer.load_adapter`."""
    engine = _engine(server)
    pull = client.pull(adapter, version)
    number = pull.version.number
    name, base = f"{pull.version.model}@{number}", BaseVersion.of(pull.version.metadata)
    if base is None:
        raise FailedPrecondition(f"{name} is not an adapter", fix="weighbridge follow serves whole models")
    config = json.loads(client.model_files(adapter, number)[ADAPTER_CONFIG])
    below = client.pull(base.model, base.number).layout.tensors
    reasons = list(unserved(config, pull.layout.tensors, below, engine))
    if reasons:
        raise FailedPrecondition(f"SGLang cannot serve {name}", details=first_lines(reasons), fix=_FIX)
    check_serves(server, name, base)
    if name in loaded(server):
        return LoadedAdapter(name, str(base), pull.nbytes, "")
    way = FILES
    if folder is None:
        way = TENSORS
        request = {
            "lora_name": name,
            "config_dict": config,
            "serialized_named_tensors": [_payload(dict(pull))] * int(engine["tp_size"]),
        }
        try:
            _told(server, _FROM_TENSORS, request)
        except NoRoute as error:
            raise FailedPrecondition(
                f"this release of SGLang has no {_FROM_TENSORS}",
                fix="name a folder that both this process and the engine can access: --folder, or folder=",
            ) from error
    else:
        place = folder.absolute() / name
        if not (place / ADAPTER_CONFIG).is_file():
            client.export(adapter, number, place)
        _told(server, _FROM_FOLDER, {"lora_name": name, "lora_path": str(place)})
    try:
        check_serves(server, name, base)
    except FailedPrecondition:  # the base was updated meanwhile
        unload(server, name)
        raise
    return LoadedAdapter(name, str(base), pull.nbytes, way)


def unload(server: Server, name: str) -> None:
    """Unload an adapter once running requests that use it have ended."""
    _told(server, _UNLOAD, {"lora_name": name})


def loaded(server: Server) -> tuple[str, ...]:
    """The adapters that a server has, by their names in requests."""
    path = "/v1/models"
    said = server.api.call(path)
    with understood(server.url + path):
        return tuple(sorted(str(each["id"]) for each in said["data"] if each.get("parent")))


def check_serves(server: Server, name: str, base: BaseVersion) -> None:
    """Refuse an adapter unless all ranks of the engine report its base version.

    Raises FailedPrecondition, which names both versions.
    """
    if base.model != server.model:
        raise FailedPrecondition(
            f"{name} is on {base}, and this engine serves versions of {server.model}",
            fix=f"load it into an engine that serves {base}",
        )
    serving = server.serving()
    if serving.broken:
        raise FailedPrecondition(
            f"{name} is on {base}, and the engine does not serve a single version: {serving.broken}",
            fix="let the agent update the engine, or restart the engine",
        )
    if serving.version != base.number:
        there = f"{server.model}@{serving.version}" if serving.version else "no known version"
        raise FailedPrecondition(
            f"{name} is on {base}, and this engine serves {there}",
            fix=f"update the engine to {base}, or push the adapter on the version that is served",
        )


def _engine(server: Server) -> Mapping[str, Any]:
    """Settings of a server, from ``/server_info``. Raises FailedPrecondition if it does not accept adapters."""
    path = "/server_info"
    info = server.api.call(path)
    with understood(server.url + path):
        enabled, replicas = bool(info.get("enable_lora")), int(info.get("dp_size") or 1)
        int(info["tp_size"])
    if not enabled:
        raise FailedPrecondition(
            f"{server.url} was started without adapters",
            fix="start it with --enable-lora --max-lora-rank R --lora-target-modules MODULES",
        )
    if replicas > 1:
        raise FailedPrecondition(
            f"{server.url} was started with --dp-size {replicas}, and SGLang does not load adapters into replicas",
            fix="start several servers, and load the adapter into each",
        )
    found: Mapping[str, Any] = info
    return found


def _told(server: Server, path: str, request: Mapping[str, Any]) -> None:
    answer = server.api.call(path, request)
    with understood(server.url + path):
        if not answer["success"]:
            raise EngineFailed(f"the engine refused {path}: {answer.get('error_message')}")


def _payload(tensors: Mapping[str, torch.Tensor]) -> str:
    """Tensors in SGLang's format: pickled, with only the types that it accepts."""
    import pickle

    return base64.b64encode(pickle.dumps({name: tensor.clone() for name, tensor in tensors.items()})).decode()
