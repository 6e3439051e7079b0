"""Registration of a model: checks of its files, tensors derived from them, and the registration that heads store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weighbridge._core import dtypes
from weighbridge._core.block_scales import says_quantized
from weighbridge._core.file_names import ADAPTER_CONFIG, is_adapter
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import Model
from weighbridge._core.text.shortening import shown
from weighbridge._formats.naming.weight_files import config_name
from weighbridge.errors import Conflict, DataLoss, FailedPrecondition, InvalidArgument
from weighbridge_service.families import has_weight_map, no_weight_map
from weighbridge_service.models.adapters import check_adapter_config
from weighbridge_service.models.bridges import bridge_for, parse_config
from weighbridge_service.models.listed_tensors import ListedTensors, read_tensor_list
from weighbridge_service.models.model_tensors import ModelTensors, tensors_found, usual_dtype
from weighbridge_service.models.registered_model import IDENTITY_FORMAT, RegisteredModel, model_type_of
from weighbridge_storage.documents.names import (
    ModelName,
    check_file_name,
    check_file_names,
    files_id_of,
    first_version_of,
)
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import delete_model, register
from weighbridge_storage.stores.objects import ObjectStore

_SINCE = "since_ms"
"""Field in the registration of a part: the time at which an earlier model of the same name was deleted, in milliseconds
since 1970 UTC, or 0 if no such model was deleted. It distinguishes the part from a part of the earlier model.
"""
_NO_CONFIG, _NO_DTYPE = b"{}", dtypes.parse("uint8")
"""Placeholders for the config and the usual dtype of parts of models. Parts do not have registered files."""


def files_key(model: ModelName, files_id: str, file: str) -> str:
    """Key of a registered file in the store."""
    return f"{model.prefix}files/{files_id}/{check_file_name(file)}"


def registered_files(store: ObjectStore, model: ModelName, files_id: str) -> dict[str, bytes]:
    """Files of one registration, by name. Versions keep the files with which they were opened, even if other files have
    been registered since.
    """
    names = sorted(registered_names(store, model, files_id))
    return {name: store.get(files_key(model, files_id, name))[0] for name in names}


def registered_names(store: ObjectStore, model: ModelName, files_id: str) -> list[str]:
    """Names of the files of one registration."""
    prefix = f"{model.prefix}files/{files_id}/"
    return [key.removeprefix(prefix) for key in store.list(prefix)]


def files_identity(files: Mapping[str, bytes]) -> str:
    """Identity of a set of files: 32 hex digits of the SHA-256 over names, lengths and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def model_for_registration(
    name: ModelName,
    files: Mapping[str, bytes],
    dtype: str,
    found: Sequence[TensorSpec] = (),
    there: Head | None = None,
    listed: ListedTensors | None = None,
    *,
    weight_map: bool = True,
) -> RegisteredModel:
    """Check a registration and derive the model's tensors from it.

    Args:
        name: the model's name.
        files: its files other than the weights.
        dtype: dtype of its weights. If empty: the dtype of ``found``, or else of the existing registration, or else of
            the config.
        found: the tensors in its weight files, if it has any.
        there: the model's head, if it is registered already, or the remaining head of a deleted model.
        listed: the model's tensors, if it is already registered without a weight map; not required with ``found``.
        weight_map: False registers the model by its tensors alone, even if a weight map exists. A model that was
            registered without a weight map stays without one if it has versions or if ``found`` is not given, because a
            weight map would change the order of tensors in its files.

    Raises:
        InvalidArgument: a file's name is not allowed, ``config.json`` is missing, the model type has no weight map and
            the tensors are unknown, the dtype is unknown, or the tensors do not match the config.
    """
    check_file_names(files)
    if "config.json" not in files and ADAPTER_CONFIG not in files:
        raise InvalidArgument(
            "config.json is not among the model's files",
            fix="name a folder that model.save_pretrained() wrote",
        )
    config_json = files[config_name(files)]
    config = parse_config(config_json)
    if is_adapter(files):
        check_adapter_config(config)
    # releases of transformers write one name or the other, and read a missing one as float32
    named = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    kept = ModelTensors(dtypes.parse(str(named)))
    model_type = model_type_of(config)
    same_type = (
        there is not None
        and there.registration.get("model_type") == model_type
        and is_adapter_head(there) == is_adapter(files)
    )
    first_version = 1 if there is None else there.first_version
    files_id = files_id_of(first_version, files_identity(files))
    has_versions = there is not None and there.next_version > first_version
    if is_adapter(files) and not found:
        raise InvalidArgument(
            f"the tensors of the adapter {name} are not known",
            fix=(
                "register it by its folder: weighbridge import ADAPTER_DIR MODEL --base "
                "BASE@VERSION, or TrainerClient.push_adapter"
            ),
        )
    goes_on = there is not None and is_listed(there) and same_type and (has_versions or not found)
    if not weight_map or goes_on or not has_weight_map(config):
        tensors = _listed(config, dtype, found, listed if same_type else None)
        kept = ModelTensors(usual_dtype(tensors.specs), listed=tensors.digest)
        return RegisteredModel(name, config_json, kept, files_id, sorted(files), tensors)
    if found:
        by_files = tensors_found(bridge_for(files["config.json"]), config, found)
        kept = replace(kept, absent=by_files.absent) if dtype else by_files
    elif not dtype and there is not None and has_versions and not is_listed(there):
        kept = _kept(name, there)
    model = RegisteredModel(name, files["config.json"], kept, files_id, sorted(files))
    _ = model.identity  # builds the bridge: a model without a valid map is refused now, not at a push
    return model


def _listed(
    config: Mapping[str, Any], dtype: str, found: Sequence[TensorSpec], listed: ListedTensors | None
) -> ListedTensors:
    """Tensors of a model without a weight map. Floating-point tensors are cast to ``dtype`` unless it is empty."""
    if found:
        listed = ListedTensors.of(found)
    if listed is None:
        fix = (
            "register it by its tensors: `weighbridge import HF_DIR MODEL` with a folder that has weights, or "
            "trainer.register_model(model, hf_dir, tensors=module_or_state_dict)"
        )
        if has_weight_map(config):
            raise InvalidArgument("the tensors of the model are not known without a weight map", fix=fix)
        problem = ", so config.json does not say which tensors the model has"
        raise no_weight_map(config.get("model_type"), problem, fix)
    if not dtype:
        return listed
    target = dtypes.parse(dtype)
    if not target.is_float:
        raise InvalidArgument(
            f"a model cannot be registered in {target}",
            fix="name bf16, fp16 or fp32; without a dtype, each tensor keeps its own",
        )
    return listed.cast(target, quantised=says_quantized(config))


def part_registration(name: ModelName, there: Head) -> RegisteredModel:
    """Registration of a part of a model. The part itself does not have files or tensors; each of its versions does.

    Args:
        name: name of the part.
        there: head of the part.
    """
    files_id = files_id_of(there.first_version, files_identity({}))
    return RegisteredModel(name, _NO_CONFIG, ModelTensors(_NO_DTYPE), files_id, (), ListedTensors(()))


def with_part(name: ModelName, head: Head, of: Head, now_ms: int) -> Head:
    """Head of a part with its registration.

    If the part belongs to a deleted model of the same name, the part is deleted first.

    Args:
        name: name of the part.
        head: head of the part.
        of: head of its model.
        now_ms: the time, in milliseconds since 1970 UTC.

    Raises:
        FailedPrecondition: the service is receiving versions of the deleted model's part, or the model is an adapter.
    """
    if head.files_id and not is_part_of(head, of):
        head = delete_model(head, now_ms)
    if head.files_id:
        return head
    if is_adapter_head(of):
        raise FailedPrecondition(
            f"{name.model} is an adapter, and adapters have no {name.part} states",
            fix="push the training state with the model that is trained: docs/recipes/lora.md",
        )
    model = part_registration(name, head)
    kept = {"model_type": "", **model.kept.to_json(), "tensor_count": 0, "tensor_bytes": 0, "files": []}
    return register(head, model.files_id, {**kept, _SINCE: _since_ms(of)})


def is_part_of(head: Head, of: Head) -> bool:
    """Whether a part belongs to the model with this head, and not to a deleted model of the same name."""
    return bool(of.files_id) and head.registration.get(_SINCE) == _since_ms(of)


def _since_ms(of: Head) -> int:
    return 0 if of.deletion is None else of.deletion.deleted_ms


def registration_of(model: RegisteredModel) -> dict[str, Any]:
    """Registration as the head stores it: enough to list the model without deriving its tensors."""
    return {
        "model_type": model.model_type,
        **model.kept.to_json(),
        "tensor_count": len(model.tensors),
        "tensor_bytes": model.files.layout.nbytes,
        "files": list(model.side_files),
        "tensors_digest": model.files.layout.digest,
        "identity": model.identity,
        **({"adapter": True} if model.is_adapter else {}),
    }


def registered(head: Head, model: RegisteredModel) -> Head:
    """Head with this registration. It may replace any other registration until the first version is opened.

    Raises:
        FailedPrecondition: the model is registered with other tensors.
        Conflict: the model was deleted since the registration was prepared.
    """
    if first_version_of(model.files_id) != head.first_version:
        raise Conflict(f"{model.name} was deleted in the meantime", fix="register it again")
    if head.next_version > head.first_version and model.is_adapter != is_adapter_head(head):
        before, now = ("an adapter", "a model") if is_adapter_head(head) else ("a model", "an adapter")
        raise FailedPrecondition(
            f"{model.name} is registered as {before}, but this is {now}",
            fix="use a different model name",
        )
    if head.next_version > head.first_version and not _agree(head.registration, model):
        if model.is_adapter:
            raise FailedPrecondition(
                f"{model.name} is registered already, with "
                f"{head.registration.get('tensor_count')} different tensors: rank, target "
                "modules and dtypes "
                "of an adapter stay those of its first version",
                fix="use a different model name for this adapter",
            )
        raise FailedPrecondition(
            f"{model.name} is registered already, with different tensors or heads: as "
            f"{head.registration.get('model_type')} in "
            f"{head.registration.get('dtype')} with {head.registration.get('tensor_count')} tensors",
            fix="register the new model under another name",
        )
    return register(head, model.files_id, registration_of(model))


def _agree(there: Mapping[str, Any], model: RegisteredModel) -> bool:
    """Whether the stored registration has the same tensors, in the same places."""
    identity = str(there.get("identity", ""))
    if identity.startswith(f"{IDENTITY_FORMAT}:"):
        return identity == model.identity
    # another release computes the identity differently
    return bool(there.get("tensors_digest") == model.files.layout.digest)


def summary_from_head(name: ModelName, head: Head, refs: Mapping[str, int]) -> Model:
    """Description of the model for callers, from its head alone.

    Raises:
        DataLoss: the registration in the head is incomplete.
    """
    kept = head.registration
    try:
        return Model(
            name=str(name),
            model_type=kept["model_type"],
            dtype=kept["dtype"],
            tensor_count=kept["tensor_count"],
            tensor_bytes=kept["tensor_bytes"],
            files=tuple(kept["files"]),
            refs=refs,
            weight_map=not (name.part or is_listed(head)),
            adapters=tuple(sorted({pin.adapter for pin in head.pins})),
            base=_newest_base(head),
        )
    except (KeyError, TypeError) as error:
        raise DataLoss(f"the registration in the head of {name} is incomplete: {error!r}") from error


def _newest_base(head: Head) -> str:
    """Base of an adapter's newest version among those that the head itself lists; empty for other models."""
    if not is_adapter_head(head):
        return ""
    said = {number: each.metadata for number, each in head.recent.items() if not each.retired}
    said |= {number: each.metadata for number, each in head.open.items()}
    return next((str(base) for number in sorted(said, reverse=True) if (base := BaseVersion.of(said[number]))), "")


def check_registration(name: ModelName, head: Head) -> ModelTensors:
    """Check the registration in a head, from which the model is listed and loaded.

    Returns the properties of its tensors.

    Raises:
        DataLoss: a field is missing, or `registration_of` does not write it in this form.
    """
    found = summary_from_head(name, head, {})
    texts, numbers = (found.model_type, found.dtype), (found.tensor_count, found.tensor_bytes)
    files = head.registration["files"]
    try:
        kept = _kept(name, head)
        sound = (
            all(isinstance(text, str) for text in texts)
            and all(type(n) is int and n >= 0 for n in numbers)
            and isinstance(files, list)
            and (name.part or config_name(files) in [check_file_name(file) for file in files])
        )
    except InvalidArgument as error:
        raise DataLoss(f"the registration in the head of {name} is damaged: {error.message}") from error
    if not sound:
        raise DataLoss(f"the registration in the head of {name} is damaged: {shown(dict(head.registration))}")
    return kept


def load_model(store: ObjectStore, name: ModelName, head: Head) -> RegisteredModel:
    """Load a registered model from the store."""
    if name.part:
        return part_registration(name, head)
    config, _ = store.get(files_key(name, head.files_id, config_name(head.registration["files"])))
    kept = _kept(name, head)
    listed = read_tensor_list(store, name, kept.listed, head.first_version) if kept.listed else None
    try:
        return RegisteredModel(name, config, kept, head.files_id, head.registration["files"], listed)
    except (KeyError, TypeError) as error:
        raise DataLoss(f"the registration in the head of {name} is damaged: {error!r}") from error


def is_adapter_head(head: Head) -> bool:
    """Whether a model is registered as an adapter."""
    return bool(head.registration.get("adapter"))


def is_listed(head: Head) -> bool:
    """Whether a model is registered with a list of its tensors instead of a weight map."""
    return bool(head.registration.get("listed"))


def is_registered(head: Head, model: RegisteredModel) -> bool:
    """Whether the head contains this registration."""
    return head.files_id == model.files_id and model.kept == _kept(model.name, head)


def _kept(name: ModelName, head: Head) -> ModelTensors:
    try:
        return ModelTensors.from_json(head.registration)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataLoss(f"the registration in the head of {name} is damaged: {error!r}") from error
