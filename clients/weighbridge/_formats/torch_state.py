"""Layout and tensors of a torch state dict that has Hugging Face's names: of FSDP2, HSDP, tensor parallelism, DDP, or
one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge._formats import peft_models, zero3
from weighbridge._formats.dtensors import local_shards, local_tensor
from weighbridge._formats.memory_forms import Form, MemoryShards, TensorForms
from weighbridge._formats.misfits import Misfit, check_prefix, told
from weighbridge._formats.naming.parameter_names import (
    check_merged,
    is_embedding,
    is_head,
    unwrapped_names,
    unwrapped_parts,
)
from weighbridge._formats.tensor_stream import cast_of
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

ALLOW, EXACT, NEVER = CASTS = ("allow", "exact", "never")
"""Rules for a tensor whose floating-point dtype differs from the model's: cast it; cast it if the cast is exact; refuse
it.
"""
NAMED = 20
"""Number of problems that an error names; it counts them all."""
_ASKS = "a pull can cast to a different dtype: pull(..., dtype='bf16')"
_NOT_ALLOWED, _NOT_EXACT = "casts are not allowed", "the cast would not be exact"


@dataclass(frozen=True)
class TorchShards:
    """Part of a model on one rank.

    Attributes:
        layout: the shards as one stream, in Hugging Face's tensor space; with the dtypes of the model, not of the
            tensors.
        tensors: the tensor of each shard, of the extent of its box, in its own dtype; they alias the given tensors.
        cast: tensors whose floating-point dtype differs from the model's.
        unknown: given names that the model does not have.
        absent: tensors of the model that were not given.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    cast: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This rank and the number of ranks: as given, or else from torch.distributed, or else 0 and 1."""
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if there else 0
    if world_size is None:
        world_size = dist.get_world_size() if there else 1
    return rank, world_size


def torch_shards(
    state: Any,
    model: Mapping[str, TensorSpec],
    *,
    cast: str = ALLOW,
    whole: bool = False,
    others: bool = False,
    filled: bool = False,
    merge: bool = True,
    of: str = "the model",
) -> TorchShards:
    """Find the model's tensors in a state dict.

    Tied copies of the model's tensors are left out, and so are rotary frequencies (``inv_freq``), which are not
    weights.

    Args:
        state: a module, a state dict, or ``(name, tensor)`` pairs; tensors are plain ones or DTensors on any device.
            Names are Hugging Face's, or those of other forms in memory (`memory_forms`); parts that wrappers add are
            stripped.
        model: its tensors, by name.
        cast: ``allow``, ``exact`` or ``never``: whether floating-point dtypes may differ from the model's.
        whole: whether all tensors of the model must be there, since no other rank holds any.
        others: whether there may be names that the model does not have.
        filled: whether the tensors are filled from the model, instead of pushed to it. Copies that this rank has in
            addition to its shards, such as ZeRO-3's copies of small parameters, are then included.
        merge: whether adapters of a module are merged into copies of the base weights. If not, the base weights are
            used instead, which is sufficient for checks.
        of: the model's name in errors.

    Raises:
        InvalidArgument: ``state`` has an unsupported type, or ``cast`` is unknown.
        LayoutError: names, shapes, dtypes or placements contradict the model, or LoRA adapters cannot be merged.
    """
    import torch

    check_cast(cast)
    if filled and isinstance(state, torch.nn.Module) and peft_models.has_adapters(state):
        raise LayoutError("the module has LoRA adapters already", fix="fill the model before peft adds them")
    entries = list(_entries(state, merge))
    check_merged([name for name, _ in entries], peft_models.RECIPE)
    reader = _Reader(TensorForms.of(model), cast, filled, of)
    for name, value in entries:
        reader.read(name, value)
    return reader.shards(whole=whole, others=others)


def adapter_forms(state: Mapping[str, torch.Tensor]) -> TensorForms:
    """Forms of an adapter's tensors, by their names in its state dict."""
    return TensorForms(
        {name: TensorSpec(name, dtypes.from_torch(value.dtype), shape_of(value)) for name, value in state.items()}
    )


def adapter_shards(
    state: Mapping[str, torch.Tensor], forms: TensorForms, *, whole: bool, of: str, filled: bool = False
) -> TorchShards:
    """Part of an adapter on a rank: the tensors of its state dict.

    Other arguments and errors are those of `torch_shards`.

    Args:
        state: tensors of the adapter, by name.
        forms: forms of these tensors, as `adapter_forms` finds them.
    """
    reader = _Reader(forms, NEVER, filled=filled, of=of)
    for name, value in state.items():
        reader.read(name, value)
    return reader.shards(whole=whole, others=False)


def adapter_targets(
    state: Mapping[str, torch.Tensor], adapter: Mapping[str, TensorSpec], *, cast: str, strict: bool, of: str
) -> TorchShards:
    """The tensors of an adapter in memory that receive those of a stored ``adapter``.

    Arguments and errors are those of `torch_shards`.
    """
    check_cast(cast)
    reader = _Reader(TensorForms.of(adapter), cast, filled=True, of=of)
    for name, value in state.items():
        reader.read(name, value)
    return reader.shards(
        whole=strict,
        others=not strict,
        fix=(
            f"fill an adapter built from the adapter_config.json of {of}; strict=False fills only "
            "the tensors that both have"
        ),
    )


def tensor_specs(state: Any) -> list[TensorSpec]:
    """Specs of the tensors in a state dict, for registering a model.

    Prefixes that wrappers add are stripped. Tied tensors share memory; only the first one is included.

    Args:
        state: as for `torch_shards`. Shapes are those of the whole tensors.

    Raises:
        InvalidArgument: ``state`` is not a state dict, or has a dtype that safetensors does not support.
        LayoutError: LoRA adapters are not merged, a value is not a tensor, or two tensors have the same name.
    """
    import torch

    entries = list(_entries(state, merge=False))
    check_merged([name for name, _ in entries], peft_models.RECIPE)
    wrong = [f"{name} is a {type(value).__name__}" for name, value in entries if not isinstance(value, torch.Tensor)]
    if wrong:
        raise LayoutError(
            f"the state dict contains values that are not tensors, in {counted(len(wrong), 'entry', 'entries')}",
            details=first_lines(wrong),
            fix="leave them out here and in each push",
        )
    sparse = [found for name, value in entries if (found := not_dense(name, value)) is not None]
    if sparse:
        raise LayoutError(
            f"the state dict contains tensors that are not dense, in {counted(len(sparse), 'entry', 'entries')}",
            details=first_lines(told(sparse)),
        )
    names = unwrapped_names(name for name, _ in entries)
    own: dict[Any, TensorSpec] = {}
    for name, value in entries:
        local = held_tensor(value)
        # compare storages, not addresses: tensors on the meta device and empty ones have no address
        where = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
        own.setdefault(
            (where, value.dtype, shape_of(value)),
            TensorSpec(names[name], dtypes.from_torch(value.dtype), shape_of(value)),
        )
    return list(own.values())


def check_not_copied(module: torch.nn.Module, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a module whose ``state_dict()`` returns copies, as in FSDP1: filling the copies would not fill the module.

    Args:
        module: the module.
        layout: shards of its state.
        tensors: one for each of them.

    Raises:
        LayoutError: it returns copies; names the tensors.
    """
    own = {
        local_tensor(tensor).untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())
    } | {
        parameter.ds_tensor.untyped_storage().data_ptr()  # type: ignore[attr-defined]
        for parameter in module.parameters()
        if zero3.is_partitioned(parameter)
    }
    copied = [
        placement.shard.tensor
        for placement, tensor in zip(layout.placements, tensors, strict=True)
        if tensor.untyped_storage().data_ptr() not in own
    ]
    if copied:
        raise LayoutError(
            counted(
                len(copied),
                "tensor of the module's state_dict() is a separate copy",
                "tensors of the module's state_dict() are separate copies",
            ),
            details=first_lines(copied),
            fix="use fully_shard (FSDP2), or restore a state dict and load it into the module",
        )


class _Reader:
    """Reads the entries of a state dict, and collects their problems."""

    def __init__(self, model: TensorForms, cast: str, filled: bool, of: str) -> None:
        self._model = model
        self._of = of
        self._cast = cast
        self._filled = filled
        self._found: set[str] = set()
        self._given: dict[str, torch.Tensor] = {}
        self._unknown: list[tuple[str, Any]] = []
        self._shards: list[Shard] = []
        self._tensors: list[torch.Tensor] = []
        self._problems: list[Misfit] = []

    def read(self, given_name: str, value: Any) -> None:
        """Read one entry."""
        import torch

        key = None
        if _is_ordinary(value):
            key = given_name, value.shape, value.dtype, self._cast, self._filled
            reading = self._model.readings.get(key)
            if reading is not None and self._found.isdisjoint(reading.tensors):
                self._take(reading, value)
                return
        form = model_form(given_name, self._model)
        if form is None:
            self._unknown.append((given_name, value))
        elif not isinstance(value, torch.Tensor):
            self._problems.append(Misfit(f"{given_name} is a {type(value).__name__}, not a tensor"))
        elif (sparse := not_dense(given_name, value)) is not None:
            self._found.update(form.tensors)
            self._problems.append(sparse)
        elif not self._found.isdisjoint(form.tensors):
            self._problems.append(Misfit(f"{form.name} is given twice"))
        else:
            self._found.update(form.tensors)
            self._given[form.name] = value
            shape = shape_of(value)
            problem = misfit(form, shape, value.dtype, self._cast, filled=self._filled)
            if value.is_meta:
                alike = "on the meta device, without data"
                problem = Misfit(f"{form.name} is {alike}", f"are {alike}", form.name)
            if problem:
                self._problems.append(problem)
                return
            try:
                held = shards_of(value)
            except LayoutError as error:
                self._problems.append(Misfit(f"{form.name}: {error.message}"))
                return
            copy = zero3.gathered_copy(value) if self._filled and zero3.is_partitioned(value) else None
            if copy is not None:
                held.append((Box.whole(shape), copy))
            swapped = form.is_swapped(shape)
            found = [(part, tensor) for box, tensor in held for part in form.parts(box, swapped=swapped)]
            shards = [Shard(part.tensor, part.box) for part, _ in found]
            self._shards += shards
            self._tensors += [part.view(tensor) for part, tensor in found]
            if key is not None:
                parts = tuple(zip(shards, (part for part, _ in found), strict=True))
                self._model.readings[key] = MemoryShards(form.name, form.tensors, parts)

    def _take(self, reading: MemoryShards, value: torch.Tensor) -> None:
        """Read an entry in the same way as an earlier entry of the same kind."""
        self._found.update(reading.tensors)
        self._given[reading.name] = value
        held = value.detach()
        for shard, part in reading.parts:
            self._shards.append(shard)
            self._tensors.append(part.view(held))

    def shards(self, *, whole: bool, others: bool, fix: str = "") -> TorchShards:
        """Shards of all entries that were read. Raises LayoutError with all problems; its ``fix`` is the given one, if
        any, unless casts are the only problem.
        """
        import torch

        problems, unknown, foreign = self._problems, [], []
        known = {memory_of(tensor) for tensor in self._given.values()} if self._unknown else set()
        for name, value in self._unknown:
            if isinstance(value, torch.Tensor) and (
                name.endswith("inv_freq") or (value.layout == torch.strided and memory_of(value) in known)
            ):
                continue
            unknown.append(name)
            if others:
                continue
            if not isinstance(value, torch.Tensor):
                problems.append(Misfit(f"{name} is a {type(value).__name__}, not a tensor"))
            else:
                foreign.append(name)
        check_prefix(foreign, self._model)
        problems += unknown_names(foreign, self._model)
        absent = [name for name in self._model if name not in self._found]
        if whole:
            problems += [Misfit(f"{self._model[name]} is missing") for name in absent]
        if problems:
            for_casts = all(_NOT_ALLOWED in each.text or _NOT_EXACT in each.text for each in problems)
            raise LayoutError(
                f"the tensors differ from those of {self._of} in {counted(len(problems), 'entry', 'entries')}",
                details=first_lines(told(problems)),
                fix=f"cast='allow' casts them{'; ' + _ASKS if self._filled else ', and the report says how many'}"
                if for_casts
                else fix
                or (
                    (
                        f"fill a model that is built from the config.json of {self._of}; "
                        "strict=False fills only the tensors that both have"
                    )
                    if self._filled
                    else "pass exactly the tensors of the model's safetensors files, with the same names and shapes"
                ),
            )
        layout = self._model.stream(self._shards)
        each = zip(self._shards, self._tensors, layout.torch_dtypes, strict=True)
        return TorchShards(
            layout,
            tuple(self._tensors),
            cast=tuple(dict.fromkeys(shard.tensor for shard, tensor, dtype in each if tensor.dtype != dtype)),
            unknown=tuple(unknown),
            absent=tuple(absent),
        )


def _is_ordinary(value: Any) -> bool:
    """Test whether this is a dense tensor that holds all of its elements itself: name, shape and dtype then decide how
    it is read.
    """
    import torch

    known = type(value) is torch.Tensor or type(value) is torch.nn.Parameter
    return known and value.layout == torch.strided and not value.is_meta and not zero3.is_partitioned(value)


def model_form(name: str, model: TensorForms) -> Form | None:
    """The form of a tensor in memory, looked up by the given name, or by that name without the parts that wrappers add;
    None if the model has neither.
    """
    found = model_name(name, model) or model_name(name, model.other_forms)
    return None if found is None else model.form(found)


def model_name(name: str, model: Collection[str]) -> str | None:
    """The model's name for a tensor: as given, or without the parts that wrappers add; None if the model has
    neither.
    """
    if name in model:
        return name
    parts = unwrapped_parts(name)
    while ".".join(parts) not in model:
        if parts[:1] != ["module"]:  # DDP's, perhaps several
            return None
        del parts[0]
    return ".".join(parts)


def _entries(state: Any, merge: bool) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(state, torch.nn.Module):
        entries = zero3.partitioned_state(state) or state.state_dict()
        state = (
            peft_models.merged_entries(state, entries.items(), merge=merge)
            if peft_models.has_adapters(state)
            else entries
        )
    pairs = state.items() if isinstance(state, Mapping) else state
    # a tensor's rows are not pairs
    for pair in pairs if isinstance(pairs, Iterable) and not isinstance(pairs, torch.Tensor) else [pairs]:
        match pair:
            case (str(name), value):
                yield name, value
            case _:
                raise InvalidArgument(
                    f"a {type(state).__name__} is not a state dict",
                    fix="pass a module, a state dict, or pairs of a name and a tensor",
                )


def check_cast(cast: str) -> None:
    """Check that the cast rule exists. Raises InvalidArgument."""
    if cast not in CASTS:
        raise InvalidArgument(f"cast={cast!r} is not known", fix="use one of " + ", ".join(map(repr, CASTS)))


def not_dense(name: str, value: torch.Tensor) -> Misfit | None:
    """Misfit of a sparse or opaque tensor, because versions contain dense elements in row-major order; None for a dense
    tensor.
    """
    import torch

    if value.layout == torch.strided:
        return None
    alike = f"of {value.layout}, but versions contain dense tensors: pass tensor.to_dense()"
    return Misfit(f"{name} is {alike}", f"are {alike}", name)


def unknown_names(names: Sequence[str], model: Collection[str]) -> Iterator[Misfit]:
    """Misfits for names that a model does not have.

    The first ones suggest the nearest name of the model, each name once.
    """
    meant: set[str] = set()
    for index, name in enumerate(names):
        nearest = _shares(name, model) or did_you_mean(name, model) if index < NAMED else ""
        yield Misfit(f"{name}: the model has no such tensor{'' if nearest in meant else nearest}")
        meant.add(nearest)


def _shares(name: str, model: Collection[str]) -> str:
    """Note about a head with separate memory that the model ties to its embedding; empty for other tensors."""
    embeddings = list(filter(is_embedding, model))
    if not is_head(name) or len(embeddings) != 1 or any(map(is_head, model)):
        return ""
    return (
        f"; its head, if it has one, is {embeddings[0]}: tie them in the trainer (peft: "
        "ensure_weight_tying=True), or register a "
        "model with both tensors, and tie_word_embeddings=false in its config.json"
    )


def mismatch(form: Form, shape: Sequence[int], dtype: torch.dtype, cast: str, *, filled: bool = False) -> str | None:
    """Message of `misfit`."""
    found = misfit(form, shape, dtype, cast, filled=filled)
    return None if found is None else found.text


def misfit(form: Form, shape: Sequence[int], dtype: torch.dtype, cast: str, *, filled: bool = False) -> Misfit | None:
    """Reason why a tensor with this shape and dtype cannot be this tensor of the model; None if it can.

    ``filled``: whether the tensor is filled from the model, instead of pushed to it.
    """
    if tuple(shape) == (0,) and 0 not in form.shape:
        why = "for a model that ZeRO-3 has partitioned, pass the module itself"
        return Misfit(
            f"{form.name} is empty, and the model has {form}; {why}",
            f"are empty, and the model's are not; {why}",
            form.name,
        )
    if tuple(shape) != form.shape and not form.is_swapped(shape):
        return Misfit(f"{form.name} is {list(shape)}, and the model has {form}")

    def of_dtype(because: str, spec: TensorSpec) -> Misfit:
        what = f"{dtype}, {because}, and the model has"
        return Misfit(f"{form.name} is {what} {spec}", f"are {what} {spec.dtype}", form.name)

    for spec in {member.spec.dtype: member.spec for member in form.members}.values():
        if cast_of(spec, dtype) != spec.dtype.torch:
            return of_dtype("which is not cast", spec)
        if cast == NEVER and dtype != spec.dtype.torch:
            return of_dtype(_NOT_ALLOWED, spec)
        if cast == EXACT and dtype != spec.dtype.torch:
            own = dtypes.from_torch(dtype)
            if not (spec.dtype.widens_to(own) if filled else own.widens_to(spec.dtype)):
                return of_dtype(_NOT_EXACT, spec)
    return None


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """The whole shape of a tensor, of which a rank may have only a part."""
    return tuple(value.ds_shape if zero3.is_partitioned(value) else value.shape)  # type: ignore[attr-defined]


def shards_of(value: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor that this rank holds, each with a tensor of its extent; as `local_shards`."""
    return zero3.partition_shards(value) if zero3.is_partitioned(value) else local_shards(value)


def held_tensor(value: torch.Tensor) -> torch.Tensor:
    """Part of a tensor that this rank holds, as it lies in memory."""
    held: torch.Tensor = value.ds_tensor if zero3.is_partitioned(value) else local_tensor(value)  # type: ignore[attr-defined]
    return held


def memory_of(value: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Address of a tensor's elements, and its shape; equal for two names of the same tensor."""
    return held_tensor(value).data_ptr(), shape_of(value)
