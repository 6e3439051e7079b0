"""Models of transformers that load from the service and update to any version in place.

::

    model = from_weighbridge("acme/smol@latest", "127.0.0.1:50051")
    tokenizer = tokenizer_from_weighbridge("acme/smol")
    update(model, "latest")

`trainer_callback.PushCallback` pushes from transformers' ``Trainer``. With ``tp_plan="auto"`` under torchrun, each rank
fetches only the slices that transformers' own plan assigns to it.
"""

# May import: `engine_rank`, `guarded_pushes`, `_lazy`, `_clients` and folders below, and transformers.
#
# - `adapters`: adapters of peft on such models.
# - `building`: which tensors become which parameters.
# - `options`: what ``from_pretrained`` takes besides.
# - `model`: a rank's model, to the contract.
# - `golden`: golden prompts made of a model.
# - `trainer_callback`: pushes of transformers' ``Trainer``.

from __future__ import annotations

import logging
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._clients.engine import EngineClient
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import Version
from weighbridge._formats.hf_folder import write_side_files
from weighbridge._formats.side_files.carried import has_tokenizer
from weighbridge._lazy import Source
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound
from weighbridge.integrations.engine_rank.agreement import RanksFailed, from_first
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.transformers.adapters import (
    AttachedAdapter,
    attached,
    check_attachable,
    check_base,
)
from weighbridge.integrations.transformers.building import Recipe, concrete_class, materialise, weights_of
from weighbridge.integrations.transformers.model import TransformersModel, ranks_of
from weighbridge.integrations.transformers.options import (
    check_not_quantised,
    configured,
    dtype_option,
    single_device,
    supported,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_live: weakref.WeakKeyDictionary[Any, LiveModel] = weakref.WeakKeyDictionary()
_adapters: weakref.WeakKeyDictionary[Any, dict[str, AttachedAdapter]] = weakref.WeakKeyDictionary()


def from_weighbridge(
    name: str,
    server: str | EngineClient | None = None,
    *,
    model_class: Any = None,
    config: PretrainedConfig | None = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    device_map: Any = None,
    tp_plan: Any = None,
    tp_size: int | None = None,
    strict: bool = True,
    lane: str | None = None,
    base: Any = None,
    adapter_name: str = "default",
    **options: Any,
) -> PreTrainedModel:
    """A model with the weights of a version, as ``from_pretrained`` would load it from a folder with that version.

    If the version is an adapter, returns a ``PeftModel`` on the base version that the adapter names; the other
    arguments apply to the base.

    Args:
        name: ``namespace/name@version``; the latest version if none is given.
        server: ``host:port`` of the gRPC endpoint; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. Or a client,
            which must stay open as long as the model is updated.
        model_class: a class of models or an auto class; by default the one that the version's config.json names.
        config: used instead of the version's.
        dtype: dtype of the parameters, as for ``from_pretrained``, or a name such as ``bf16``; None for the config's.
        torch_dtype: its older name; ``dtype`` takes precedence.
        device_map: one device for the whole model; parameters are allocated there directly, not in host memory first.
            ``auto`` is the only accelerator of this machine, or the CPU.
        tp_plan, tp_size: as for ``from_pretrained``: shard the model over the ranks of torch.distributed. All ranks
            call this.
        strict: refuse a version that lacks parameters of the model, or contains tensors that the model does not have.
            Otherwise transformers initialises missing parameters, and extra tensors are ignored.
        lane: as for `EngineClient`.
        base: an existing model, to which an adapter is attached instead of its base version: a transformers model, or a
            ``PeftModel``, which gets an additional adapter. Its version is compared if it came from the service;
            otherwise a log message states that it is unknown.
        adapter_name: name of the adapter in peft.
        options: further arguments of ``from_pretrained``, such as ``attn_implementation``. Those that are attributes of
            the version's config, such as ``use_cache`` or ``num_labels``, override its values, unless ``config`` is
            given.

    Raises:
        InvalidArgument: an option requests something that versions do not have, such as ``subfolder``, or would spread
            the model over several devices; names the option.
        NotFound: the model or version does not exist, or the base of an adapter was deleted.
        FailedPrecondition: the version does not fit the model; names the tensors. Or the model is quantised; or the
            adapter belongs to a different version than ``base``.
        WeighbridgeError: the service could not be reached, or has gone.

    Examples:
        >>> model = from_weighbridge("acme/smol@latest", server)
        >>> type(model).__name__, model.model.norm.weight[:3].tolist()
        ('Qwen3ForCausalLM', [0.5, 0.5, 0.5])
    """
    options = supported(options)
    client = server if isinstance(server, EngineClient) else EngineClient(server, lane=lane)
    model_name, _, asked = name.partition("@")
    several = tp_plan is not None
    version = from_first(ranks_of(several), lambda: client.version(model_name, asked or "latest"))
    on = BaseVersion.of(version.metadata)
    if on is not None:
        if base is None:
            check_base(client, version, on)
            base = from_weighbridge(
                str(on),
                client,
                model_class=model_class,
                config=config,
                dtype=dtype,
                torch_dtype=torch_dtype,
                device_map=device_map,
                tp_plan=tp_plan,
                tp_size=tp_size,
                strict=strict,
                **options,
            )
        return _with_adapter(client, version, on, base, adapter_name)
    if base is not None:
        raise InvalidArgument(f"{model_name}@{version.number} is not an adapter", fix="leave base out")
    remote = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    with _side_files(client, model_name, version.number) as folder:
        if config is None:
            config, options = configured(folder, options)
        check_not_quantised(version, getattr(config, "quantization_config", None))
        generation = None
        if "generation_config" not in options and (Path(folder) / "generation_config.json").is_file():
            from transformers import GenerationConfig

            generation = GenerationConfig.from_pretrained(folder)
        options["dtype"] = dtype_option(dtype, torch_dtype)
        options.update(_parallelism(tp_plan, tp_size))
        recipe = Recipe(concrete_class(model_class, config, **remote), config, strict, options)
        tensors = Source(client, model_name, version.number).tensors()
        model, missing = recipe.build(dict(tensors))
    if generation is not None and model.can_generate():
        # passed as an option of from_pretrained, it would lose attributes that generate() needs
        model.generation_config = generation
    model.config.name_or_path = model.name_or_path = model_name
    materialise(model, single_device(device_map, sum(each.nbytes for each in weights_of(model).values())))
    live = _live[model] = LiveModel(TransformersModel(model, recipe, missing, several=several), model_name, client)
    # transformers may only now have initialised the process group
    live._start(from_first(ranks_of(several), lambda: version).number)
    return model


def attach(
    model: PreTrainedModel, name: str, server: str | None = None, *, lane: str | None = None, **options: Any
) -> LiveModel:
    """Make a model that was loaded from another source updatable from the service.

    Args:
        model: a live transformers model.
        name: ``namespace/name``.
        server, lane: as for `from_weighbridge`.
        options: the arguments of ``from_pretrained`` that sharded its weights over ranks, such as ``tp_plan``.
    """
    recipe = Recipe(type(model), model.config, options=options)
    described = TransformersModel(model, recipe, several=bool(options), cast=True)
    live = _live[model] = LiveModel(described, name, EngineClient(server, lane=lane))
    return live


def _with_adapter(client: EngineClient, version: Version, on: BaseVersion, base: Any, adapter_name: str) -> Any:
    """A model with the adapter of a version. The adapter's base is the version ``on``."""
    check_attachable(base, adapter_name)
    below = _live.get(getattr(base, "get_base_model", lambda: base)())
    held = below.version if below is not None else None
    known = None if held is None else BaseVersion(held.model, held.number)
    if known is None:
        logger.warning(
            "%s@%d is on %s; it is not known whether the model to which it is attached is that version",
            version.model,
            version.number,
            on,
        )
    elif (known.model, known.number) != (on.model, on.number):
        raise FailedPrecondition(
            f"{version.model}@{version.number} is on {on}, and this model is {known}",
            fix="leave base out to load the base from the service; or take another version of the adapter",
        )
    model = attached(client, version, base, adapter_name)
    _adapters.setdefault(model, {})[adapter_name] = AttachedAdapter(client, version, known)
    return model


def update(model: PreTrainedModel, version: str | int = "latest", *, adapter_name: str = "default") -> Version:
    """Update a live model to a version in place; as `LiveModel.update`.

    If the model has an adapter from the service, the adapter is updated to another of its versions on the same base.
    The model must not compute during the update.

    Args:
        model: a model that `from_weighbridge` returned or that was passed to `attach`.
        version: a number or a ref.
        adapter_name: which adapter of a model with adapters.

    Raises:
        FailedPrecondition: the adapter's version has a different base (the error names both); or as for
            `LiveModel.update`.
    """
    found = _adapters.get(model, {}).get(adapter_name)
    return live_model(model).update(version) if found is None else found.update(model, adapter_name, version)


def live_model(model: PreTrainedModel) -> LiveModel:
    """`LiveModel` of a model that came from `from_weighbridge` or was given to `attach`.

    Raises:
        FailedPrecondition: the model is not one of these.
    """
    found = _live.get(model)
    if found is None:
        raise FailedPrecondition(
            "this model does not come from the service", fix="attach(model, 'namespace/name', server)"
        )
    return found


def tokenizer_from_weighbridge(name: str, server: str | None = None, *, lane: str | None = None, **options: Any) -> Any:
    """The tokenizer that belongs to a version.

    Args:
        name, server, lane: as for `from_weighbridge`.
        options: further arguments of ``AutoTokenizer.from_pretrained``.

    Raises:
        NotFound: the model or version does not exist, or it has no tokenizer; lists the files that it has.
    """
    from transformers import AutoTokenizer

    model_name, _, asked = name.partition("@")
    with (
        EngineClient(server, lane=lane) as client,
        _side_files(client, model_name, client.version(model_name, asked or "latest").number) as folder,
    ):
        found = sorted(path.name for path in Path(folder).iterdir())
        if not has_tokenizer(found):  # transformers would invent one, or fail without a reason
            raise NotFound(
                f"{model_name} has no tokenizer: its files besides the weights are {', '.join(found)}",
                fix="save the tokenizer to a folder with config.json, register_model(name, "
                "folder), and push again; or load the tokenizer from where "
                "it is",
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.name_or_path = model_name
    return tokenizer


class LiveModel:
    """A transformers model and its current version.

    Attributes:
        name: ``namespace/name``.
        rank: the part of the model in this process.
    """

    def __init__(self, model: TransformersModel, name: str, client: EngineClient) -> None:
        self.name = name
        self.rank = EngineRank(model)
        self._engine = model
        self.rank.source = ModelSource(name)
        self.rank.clients[self.rank.source] = client
        self._updating = threading.Lock()

    @property
    def version(self) -> Version | None:
        """Version of its weights; None if it has no version from the service yet, or an update failed midway and could
        not be rolled back.
        """
        return self.rank.held.version if self.rank.held is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank fetched for the version."""
        return self.rank.held.nbytes if self.rank.held is not None else 0

    def update(self, version: str | int = "latest") -> Version:
        """Update the model to a version in place. Parameters are changed only after all bytes have arrived.

        The model must not compute meanwhile.

        If the model is sharded over ranks, all ranks call it; if one of them fails, none updates.

        Args:
            version: a number or a ref.

        Returns:
            The version that the model has now.

        Raises:
            NotFound: the version does not exist, or it lacks a tensor of the model; names it.
            FailedPrecondition: the version does not fit the model (the error names the tensors), or another update is
                running.
            WeighbridgeError: the service is unreachable, or the connection was lost. Whatever is raised, the model
                keeps its version.
        """
        if not self._updating.acquire(blocking=False):
            raise FailedPrecondition(f"another update of this {self.name} is under way", fix="wait for it")
        try:
            client = self.rank.client()
            asked = from_first(self.rank.engine.ranks, lambda: client.version(self.name, version))
            if self.version is None or self.version.number != asked.number:
                self.rank.apply(asked.number)
            return asked
        except RanksFailed as failed:
            for error in filter(None, failed.errors):
                raise error from failed
            raise
        finally:
            self._updating.release()

    def _start(self, number: int) -> None:
        """Load the first version directly into the parameters, which are still empty."""
        source, recording = self.rank.load(ModelSource(self.name), number)
        if recording is not None and self.rank.held is not None:
            self._engine.load(iter(self._engine.bring_rest(self.rank.client(), source, recording)))
            self.rank.held = replace(self.rank.held, nbytes=recording.nbytes + source.fetched_bytes)


def _parallelism(tp_plan: Any, tp_size: int | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for tensor parallelism. Transformers 5 has a class for them."""
    if tp_plan is None:
        return {}
    from transformers.distributed import DistributedConfig

    if "tp_plan" in getattr(DistributedConfig, "__dataclass_fields__", ()):
        return {"distributed_config": DistributedConfig(tp_plan=tp_plan, tp_size=tp_size)}
    return {"tp_plan": tp_plan, "tp_size": tp_size}


@contextmanager
def _side_files(client: EngineClient, model: str, number: int) -> Iterator[str]:
    """A folder with the files of a version other than its weights."""
    with tempfile.TemporaryDirectory(prefix="weighbridge-") as folder:
        write_side_files(Path(folder), client.model_files(model, number))
        yield folder
