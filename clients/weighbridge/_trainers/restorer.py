"""Client that restores shards of any version into what a rank holds, and says which tensors and shards a model has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.calls import push_calls
from weighbridge._clients.client import Client
from weighbridge._clients.filling import fill_tensors
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.layouts import Layout, TensorSpec, WeightLinks
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.references import Reference, is_training, parse_reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._trainers import restoring
from weighbridge._trainers.torch_dist.folder import DEFAULT_FILE_BYTES
from weighbridge._trainers.training import restore_training
from weighbridge._trainers.training_files import WrittenCheckpoint, write_checkpoint
from weighbridge.errors import InvalidArgument, LayoutError, NotFound

if TYPE_CHECKING:
    import torch


class RestoringClient(Client):
    """The half of a trainer's client that brings weights back.

    Args:
        server, options: as for `Client`.
    """

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        super().__init__(server, **options)
        self._tensors_of: dict[str, TensorForms] = {}
        self._registered_of: dict[tuple[str, frozenset[TensorSpec]], Mapping[str, TensorSpec]] = {}
        self._links_of: dict[tuple[str, frozenset[TensorSpec]], WeightLinks] = {}

    def restore(
        self,
        model: str,
        sharded_state_dict: Any,
        *,
        version: str | int | None = None,
        optimizer: Any = None,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Version:
        """Fill a sharded state dict in place from any version, whatever parallelism it was pushed with.

        Only this rank's bytes come over the wire. Tensors of another floating-point dtype than the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` all comes from a training state, as by `restore_state_dict`.

        Args:
            model: ``namespace/name``.
            sharded_state_dict: what Megatron-core's ``model.sharded_state_dict()`` returns.
            version: a number or a ref; by default the latest.
            optimizer: as for `TrainerClient.push`; filled in place. It is given a state first, if it has none.
            state, rank_state, rank, world_size: as for `restore_state_dict`.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: the version was pushed without what is asked for.
            LayoutError: shapes, dtypes or names contradict the model or the training state.
        """
        import torch

        from weighbridge._formats.megatron_state import as_registered, sharded_tensors

        shards = sharded_tensors(sharded_state_dict)
        if is_training(model) or not (optimizer is state is rank_state is None):
            from weighbridge._formats.torch_state import rank_and_world
            from weighbridge._trainers.states.megatron_training import megatron_fit

            fit = megatron_fit(shards, optimizer)
            ranks = rank_and_world(rank, world_size)
            return restore_training(
                self._connection, model, version, fit, ranks, state=state, rank_state=rank_state
            )
        named = Reference.of(model, version, REF_LATEST).model
        with torch.no_grad(), self._registered(named, shards.layout) as registered:
            weights = as_registered(shards, registered, filled=True)
            filled = partial(restoring.megatron_shards, self._connection, model, version, weights.layout)
            # a sharded state dict holds at least one shard
            cast = fill_tensors(weights.layout, weights.tensors, filled, device="cpu")
            [(restored, _)] = deque(cast, maxlen=1)
            shards.finish_restore()
        return restored

    def export_training(
        self,
        model: str,
        version: str | int | None,
        folder: str | Path,
        *,
        checkpoint_format: str | None = None,
        replace: bool = False,
        max_file_bytes: int = DEFAULT_FILE_BYTES,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> WrittenCheckpoint:
        """Write a training state as a checkpoint of its trainer: of Megatron-core ``torch_dist``, of torch ``dcp``.

        Tensors are streamed. What ranks have besides is loaded here, with ``weights_only``. The folder appears whole or not at all.

        Args:
            model: ``namespace/name``, or the name of its part.
            version: of the part: a number or a ref; None for the one that ``model`` names, or the latest.
            folder: a new or empty folder. Of Megatron-core it becomes what ``--load`` is given: the checkpoint is ``iter_%07d`` in it, by the
                step, beside ``latest_checkpointed_iteration.txt``.
            checkpoint_format: ``torch_dist`` or ``dcp``; by default the trainer's.
            replace: write to a folder that is not empty: in the place of the checkpoint there, of Megatron-core beside other iterations.
            max_file_bytes: about how large a ``.distcp`` file may become.
            on_progress: is called with bytes written so far and in all.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: the folder is not empty, it is the state of a trainer with other checkpoints, or values have a name that means
                something else there.
            LayoutError: it has no tensors.
            DataLoss: a rank's values are missing, or are none.
            ResourceExhausted: the disk is full.
            FailedPrecondition: the folder cannot be written.
        """
        return write_checkpoint(
            self._connection, model, version, Path(folder), checkpoint_format=checkpoint_format, replaces=replace,
            max_file_bytes=max_file_bytes, on_progress=on_progress,
        )  # fmt: skip

    def restore_state_dict(
        self,
        model: str,
        state_dict_or_module: Any,
        *,
        version: str | int | None = None,
        strict: bool = True,
        optimizer: Any = None,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Version:
        """Fill a torch model in place from any version, whatever parallelism it was pushed with.

        Only this rank's bytes come over the wire. Tensors of another floating-point dtype than the model's are cast.

        With ``optimizer``, ``state`` or ``rank_state`` all comes from a training state: parameters too, in their own dtype, and ``version`` is one of
        ``namespace/name:training``. Training goes on as if it had not stopped, on as many ranks to the bit.

        Args:
            model: ``namespace/name``.
            state_dict_or_module: as for `push_state_dict`.
            version: a number or a ref; by default the latest.
            strict: whether it must hold all tensors of the model, and no others, as for `Pull.into`. If not, those are filled that both
                have, and names of which the model has none are refused.
            optimizer: as for `push_state_dict`. It takes what was pushed, whether it has made a step or not, and has nothing else afterwards.
            state: what was pushed as ``state``, by the same names, or some of it: objects load theirs, plain values are replaced in the mapping. On
                another number of ranks than pushed it, all get those of rank 0.
            rank_state: likewise, of this rank; for as many ranks as pushed it.
            rank, world_size: by default torch.distributed's, or 0 and 1.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model or version.
            InvalidArgument: that is no state dict, or the version was pushed without what is asked for.
            LayoutError: tensors are missing, unexpected, or contradict the model, or LoRA adapters are not merged; names each tensor.
        """
        import torch

        from weighbridge._formats.torch_state import check_not_copied, torch_shards

        if is_training(model) or not (optimizer is state is rank_state is None):
            from weighbridge._formats.torch_state import rank_and_world
            from weighbridge._trainers.states.torch_training import torch_fit

            fit = torch_fit(state_dict_or_module, optimizer, strict=strict)
            ranks = rank_and_world(rank, world_size)
            return restore_training(
                self._connection, model, version, fit, ranks, state=state, rank_state=rank_state
            )
        meant = Reference.of(model, version, REF_LATEST)
        with self._tensors(meant.model) as tensors, torch.no_grad():
            held = torch_shards(
                state_dict_or_module, tensors, whole=strict, others=not strict, filled=True, of=meant.model
            )
            if held.unknown and not held.tensors:
                raise LayoutError(
                    f"{meant.model} has none of the {counted(len(held.unknown), 'tensor')} that are to be restored",
                    details=first_lines(held.unknown),
                    fix="give them the names that the model's safetensors files have",
                )
            if isinstance(state_dict_or_module, torch.nn.Module):
                check_not_copied(state_dict_or_module, held.layout, held.tensors)
            return self.restore_shards(meant.model, held.layout, held.tensors, version=meant.version)

    def restore_shards(
        self, model: str, layout: Layout, tensors: Sequence[torch.Tensor], *, version: str | int | None = None
    ) -> Version:
        """Fill the shards of any layout that has Hugging Face's names; what `restore_state_dict` does in the end.

        Args:
            model: ``namespace/name``.
            layout: which shards.
            tensors: one for each of them, of the extent of its box, on any device. One of another floating-point dtype is cast to.
            version: a number or a ref; by default the latest.

        Returns:
            The version that was restored.

        Raises:
            NotFound: no such model, version or tensor.
            InvalidArgument: the layout contradicts the model.
        """
        meant = Reference.of(model, version, REF_LATEST)
        return restoring.hugging_face_shards(self._connection, meant.model, layout, tensors, meant.version)

    def restore_layout(
        self,
        model: str,
        layout: Layout,
        tensor_for: Callable[[int], torch.Tensor],
        *,
        version: str | int | None = None,
    ) -> Iterator[tuple[Version, int]]:
        """Restore the shards of a layout in megatron-core's tensor space, one after the other.

        Args:
            model: ``namespace/name``.
            layout: which shards, as a stream.
            tensor_for: gives the tensor to fill for a placement, by index.
            version: a number or a ref; by default the latest.

        Yields:
            The version, and the index of each placement that is complete.
        """
        return restoring.megatron_shards(self._connection, model, version, layout, tensor_for)

    def describe_tensors(self, model: str, *, refresh: bool = False) -> Mapping[str, TensorSpec]:
        """A model's tensors by name. They are asked for once, and again with ``refresh``: the name may stand for another model by now.

        Raises:
            NotFound: the model is not registered.
        """
        known = self._tensors_of.pop(model, None) if refresh else None
        with self._tensors(model) as tensors:
            if known == tensors:
                self._tensors_of[model] = tensors = known  # with what was derived from them
            return tensors

    def describe_shards(self, model: str, rank: MegatronRank | None = None) -> Layout:
        """The shards that a Megatron-core rank holds, by per-layer keys.

        Args:
            model: ``namespace/name``.
            rank: which rank, of which sizes; by default the only one.

        Raises:
            InvalidArgument: the sizes do not divide the model.
        """
        return self._connection.run(push_calls.describe_shards(model, rank or MegatronRank()))

    @contextmanager
    def _registered(self, model: str, layout: Layout) -> Iterator[Mapping[str, TensorSpec]]:
        """The tensors of a layout by Megatron-core's names, as the model has them. They are asked for once, as by `_tensors`."""
        key = model, frozenset(layout.tensors.values())
        known = self._registered_of.get(key)
        if known is None:
            known = self._connection.run(push_calls.registered_specs(model, layout.tensors.values()))
            self._registered_of[key] = known
        try:
            yield known
        except (InvalidArgument, NotFound):
            self._registered_of.pop(key, None)
            raise

    def _links(self, base: str, beside: Collection[TensorSpec]) -> WeightLinks:
        """Where the elements of tensors, by Megatron-core's names, are in those of a base. Of one that is named by number they are asked for once."""
        if not beside:
            return WeightLinks({}, {}, ())
        meant = parse_reference(base)
        key = base, frozenset(beside)
        links = self._links_of.get(key)
        if links is None:
            links = self._connection.run(push_calls.weight_links(meant.model, beside))
            if meant.version.isdecimal():
                self._links_of[key] = links
        return links

    @contextmanager
    def _tensors(self, model: str) -> Iterator[TensorForms]:
        """A model's tensors, which are asked for once; and again after a call that relied on them was refused."""
        tensors = self._tensors_of.get(model)
        if tensors is None:
            tensors = TensorForms(self._connection.run(push_calls.describe_tensors(model)).tensors)
            self._tensors_of[model] = tensors
        try:
            yield tensors
        except (InvalidArgument, NotFound):  # the model may have been deleted, and registered with others
            self._tensors_of.pop(model, None)
            raise
