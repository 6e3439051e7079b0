"""A transformers model that starts from the service, and goes to any version in place.

::

    model = from_weighbridge("acme/smol@latest", "127.0.0.1:50051")
    tokenizer = tokenizer_from_weighbridge("acme/smol")
    update(model, "latest")

With ``tp_plan="auto"`` under torchrun each rank brings only what transformers' own plan gives it.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from weighbridge import dtypes
from weighbridge.engine import EngineClient
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.integrations.transformers_building import (
    Recipe,
    concrete_class,
    materialise,
    single_device,
    weights_of,
)
from weighbridge.lazy import Recording, Source, Update
from weighbridge.lazy.recording import Shape
from weighbridge.resources import Version

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")
_live: weakref.WeakKeyDictionary[Any, LiveModel] = weakref.WeakKeyDictionary()


def from_weighbridge(
    name: str,
    server: str | EngineClient | None = None,
    *,
    model_class: Any = None,
    config: PretrainedConfig | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    tp_plan: Any = None,
    tp_size: int | None = None,
    strict: bool = True,
    lane: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A model with the weights of a version, as ``from_pretrained`` would make it of that version's folder.

    Args:
        name: ``namespace/name@version``; without a version the latest.
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. Or a client, which stays open as long
            as the model is to be updated.
        model_class: a class of models or an auto class; by default the one that the version's config.json names.
        config: used instead of the version's.
        dtype: of the parameters; None is the config's.
        device_map: one device for all of the model; parameters are made there, not in host memory first.
        tp_plan, tp_size: as for ``from_pretrained``: spread the model over the ranks of torch.distributed, all of which call this.
        strict: refuse a version that lacks something of the model, or has something that the model has no place for; otherwise the
            first is initialised by transformers, the second left out.
        lane: as for `EngineClient`.
        options: further arguments of ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        NotFound: no such model or version.
        FailedPrecondition: the version does not fit the model; names the tensors. Or the model is quantised.
        WeighbridgeError: the service could not be reached, or has gone.
    """
    client = server if isinstance(server, EngineClient) else EngineClient(server, lane=lane)
    model_name, _, asked = name.partition("@")
    ranks = _Ranks(tp_plan is not None)
    version = ranks.first_says(lambda: client.version(model_name, asked or "latest"))
    remote = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    with _side_files(client, model_name, version.number) as folder:
        from transformers import AutoConfig

        config = config or AutoConfig.from_pretrained(folder, **remote)
        if getattr(config, "quantization_config", None) or "quantization_config" in options:
            raise FailedPrecondition(
                f"{version} is quantised, or is to be: transformers would repack it",
                fix="load it from the service's Hugging Face endpoint, with HF_ENDPOINT",
            )
        if "generation_config" not in options and (Path(folder) / "generation_config.json").is_file():
            from transformers import GenerationConfig

            options["generation_config"] = GenerationConfig.from_pretrained(folder)
        options["dtype"] = (
            dtypes.parse(dtype).torch if isinstance(dtype, str) and dtype != "auto" else dtype or "auto"
        )
        options.update(_parallelism(tp_plan, tp_size))
        recipe = Recipe(concrete_class(model_class, config, **remote), config, strict, options)
        tensors = Source(client, model_name, version.number).tensors()
        model, missing = recipe.build(dict(tensors))
    model.config.name_or_path = model.name_or_path = model_name
    materialise(model, single_device(device_map))
    live = _live[model] = LiveModel(model, client, model_name, recipe, missing, ranks)
    # transformers may have been the first to let the ranks know of each other
    live._start(ranks.first_says(lambda: version))
    return model


def attach(
    model: PreTrainedModel, name: str, server: str | None = None, *, lane: str | None = None, **options: Any
) -> LiveModel:
    """Let a model that was loaded from elsewhere be updated from the service.

    Args:
        model: a live transformers model.
        name: ``namespace/name``.
        server, lane: as for `from_weighbridge`.
        options: the arguments of ``from_pretrained`` with which its weights were spread over ranks, such as ``tp_plan``.
    """
    ranks = _Ranks(bool(options))
    recipe = Recipe(type(model), model.config, options=options)
    live = _live[model] = LiveModel(model, EngineClient(server, lane=lane), name, recipe, set(), ranks)
    return live


def update(model: PreTrainedModel, version: str | int = "latest") -> Version:
    """Take a live model to a version, in place; as `LiveModel.update`."""
    return live_model(model).update(version)


def live_model(model: PreTrainedModel) -> LiveModel:
    """What is known of a model that came from `from_weighbridge` or was given to `attach`.

    Raises:
        FailedPrecondition: it is another one.
    """
    found = _live.get(model)
    if found is None:
        raise FailedPrecondition(
            "this model does not come from the service", fix="attach(model, 'namespace/name', server)"
        )
    return found


def tokenizer_from_weighbridge(
    name: str, server: str | None = None, *, lane: str | None = None, **options: Any
) -> Any:
    """The tokenizer that belongs to a version.

    Args:
        name, server, lane: as for `from_weighbridge`.
        options: further arguments of ``AutoTokenizer.from_pretrained``.
    """
    from transformers import AutoTokenizer

    model_name, _, asked = name.partition("@")
    with (
        EngineClient(server, lane=lane) as client,
        _side_files(client, model_name, client.version(model_name, asked or "latest").number) as folder,
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.name_or_path = model_name
    return tokenizer


class LiveModel:
    """A transformers model, and the version that it has.

    Attributes:
        name: ``namespace/name``.
        version: whose weights it has; None if it had none of the service's yet, or an update broke off while it wrote to parameters.
        nbytes: bytes that the newest version cost this rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: EngineClient,
        name: str,
        recipe: Recipe,
        missing: set[str],
        ranks: _Ranks,
    ) -> None:
        self.name = name
        self.version: Version | None = None
        self.nbytes = 0
        self._model = weakref.ref(model)
        self._client = client
        self._recipe = recipe
        self._missing = missing
        self._ranks = ranks
        self._recording: Recording | None = None
        self._updating = threading.Lock()

    def update(self, version: str | int = "latest") -> Version:
        """Take the model to a version, in place. No parameter is touched before all bytes are here; let nothing compute meanwhile.

        Of a model that is spread over ranks all ranks call it, and if one of them cannot, none does.

        Args:
            version: a number or a ref.

        Returns:
            The version that the model has now.

        Raises:
            NotFound: no such version, or it lacks a tensor of the model; names it.
            FailedPrecondition: the version does not fit the model, names the tensors; or another update is under way.
            WeighbridgeError: the service could not be reached, or has gone. Whatever is raised, the model keeps its version.
        """
        if not self._updating.acquire(blocking=False):
            raise FailedPrecondition(f"another update of this {self.name} is under way", fix="wait for it")
        try:
            asked = self._ranks.first_says(lambda: self._client.version(self.name, version))
            if self.version is None or self.version.number != asked.number:
                weights = self._weights()
                planned, rest = self._ranks.all_or_none(lambda: self._prepared(asked, weights))
                try:
                    self._fill(planned, weights, rest)
                finally:
                    planned.close()
            return asked
        finally:
            self._updating.release()

    def _start(self, version: Version) -> None:
        """Bring the first version straight to the parameters, which hold nothing yet."""
        source = Source(self._client, self.name, version.number)
        weights = self._weights()
        self._recording = self._recipe.record(source.specs, weights)
        planned, rest = self._planned(source, weights, self._recording)
        self._fill(planned, weights, rest)

    def _weights(self) -> dict[str, torch.Tensor]:
        model = self._model()
        if model is None:
            raise FailedPrecondition("the model is gone")
        return {name: tensor for name, tensor in weights_of(model).items() if name not in self._missing}

    def _prepared(
        self, version: Version, weights: Mapping[str, torch.Tensor]
    ) -> tuple[Update, dict[str, torch.Tensor]]:
        source = Source(self._client, self.name, version.number)
        known = self._recording
        if known is None or any(Shape.of(weights[name]) != shape for name, shape in known.targets.items()):
            # it comes from elsewhere, or was cast since: weights shall not be rounded to a dtype that it does not have
            dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
            self._recipe = replace(self._recipe, options={**self._recipe.options, "dtype": dtype})
            known = self._recording = self._recipe.record(source.specs, weights)
        planned, rest = self._planned(source, weights, known)
        planned.prepare(pin=any(tensor.is_cuda for tensor in weights.values()))
        return planned, rest

    def _planned(
        self, source: Source, weights: Mapping[str, torch.Tensor], recording: Recording
    ) -> tuple[Update, dict[str, torch.Tensor]]:
        """What is to be copied to the parameters, and, for those whose way could not be recorded, their content in host memory."""
        planned = recording.update(self._client, self.name, source.version.number)
        rest: dict[str, torch.Tensor] = {}
        if recording.unrecorded:
            built = weights_of(self._recipe.build(dict(source.tensors()))[0])
            rest = {
                name: torch.empty_like(weights[name], device="cpu").copy_(built[name])
                for name in weights
                if name in recording.unwritten or name not in recording.targets
            }
        self.nbytes = planned.nbytes + source.fetched_bytes
        return planned, rest

    def _fill(
        self, planned: Update, weights: Mapping[str, torch.Tensor], rest: Mapping[str, torch.Tensor]
    ) -> None:
        self.version = None
        planned.fill_all(weights)
        with torch.no_grad():
            for name, tensor in rest.items():
                weights[name].copy_(tensor)
        self.version = planned.version


class _Ranks:
    """The ranks that a model is spread over; only this process if it is not."""

    def __init__(self, several: bool) -> None:
        self._several = several

    def first_says(self, ask: Callable[[], T]) -> T:
        """What rank 0 finds out, on all ranks: a ref may move while they ask."""
        if not self._together:
            return ask()
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [_outcome(ask)]
        dist.broadcast_object_list(found, src=0)
        value: T = _value([found[0]])[0]
        return value

    def all_or_none(self, do: Callable[[], T]) -> T:
        """Do something on all ranks; if it fails on one, it fails on all."""
        mine = _outcome(do)
        if self._together:
            failures: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, (None, mine[1]))
            _value(failures)
        value: T = _value([mine])[0]
        return value

    @property
    def _together(self) -> bool:
        return self._several and dist.is_initialized()


def _outcome(do: Callable[[], T]) -> tuple[T | None, WeighbridgeError | None]:
    try:
        return do(), None
    except WeighbridgeError as error:
        return None, error
    except Exception as error:  # whichever it is: the other ranks wait to hear of it
        told = FailedPrecondition(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        return None, told


def _value(outcomes: list[Any]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def _parallelism(tp_plan: Any, tp_size: int | None) -> dict[str, Any]:
    """What ``from_pretrained`` wants to hear of tensor parallelism: transformers 5 has a class for it."""
    if tp_plan is None:
        return {}
    from transformers.distributed import DistributedConfig

    if "tp_plan" in getattr(DistributedConfig, "__dataclass_fields__", ()):
        return {"distributed_config": DistributedConfig(tp_plan=tp_plan, tp_size=tp_size)}
    return {"tp_plan": tp_plan, "tp_size": tp_size}


@contextmanager
def _side_files(client: EngineClient, model: str, number: int) -> Iterator[str]:
    """A folder with the files of a version besides its weights."""
    with tempfile.TemporaryDirectory(prefix="weighbridge-") as folder:
        for name, content in client.model_files(model, number).items():
            Path(folder, name).write_bytes(content)
        yield folder
