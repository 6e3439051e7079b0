"""Storage reader of `torch.distributed.checkpoint` that fills state dicts from a version, with any sharding."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._core.text.counts import counted
from weighbridge._formats.memory_forms import Form, TensorForms
from weighbridge._formats.torch_state import ALLOW, mismatch
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import LayoutError, NotFound
from weighbridge.integrations.checkpoint_names import step_named
from weighbridge.integrations.torch.boundary import flat_errors
from weighbridge.integrations.torch.entries import Entries, check_one_box, untied


class WeighbridgeReader(StorageReader):
    """A storage reader for ``dcp.load``. All ranks create one. A rank fetches only its own bytes.

    Args:
        model: ``namespace/name``, or with the version: ``namespace/name@latest``.
        server: ``host:port`` of the service; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. Or a client, which
            stays open.
        version: a number or a ref; by default the latest. If ``dcp.load`` receives a ``checkpoint_id``, the newest
            version of the step in that name.
        prefix: possible prefix of the model's names in the flattened state dict: ``model.`` if it is
            ``{"model": ...}``.
        retry_seconds, lane: as for `TrainerClient`.

    Attributes:
        model: the model.
        version: the loaded version; None before the load.

    Examples:
        >>> dcp.load({"model": model.state_dict()}, storage_reader=WeighbridgeReader("acme/smol", server))
        >>> model.model.norm.weight[:3].tolist()
        [0.5, 0.5, 0.5]
    """

    def __init__(
        self,
        model: str,
        server: str | TrainerClient | None = None,
        *,
        version: str | int | None = None,
        prefix: str = "model.",
        retry_seconds: float = 60.0,
        lane: str | None = None,
    ) -> None:
        super().__init__()
        meant = Reference.of(model, version, REF_LATEST)
        self.model = meant.model
        self.version: Version | None = None
        self._wanted = meant.version
        self._checkpoint: str | os.PathLike[str] | None = None
        self._prefix = prefix
        self._resolved = 0
        self._made: TrainerClient | None = None
        if isinstance(server, TrainerClient):
            self._client = server
        else:
            self._client = self._made = TrainerClient(server, retry_seconds=retry_seconds, lane=lane)
            weakref.finalize(self, self._made.close)

    def close(self) -> None:
        """Close the connection, unless a client was passed in."""
        if self._made is not None:
            self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Methods in the order in which DCP calls them.

    @flat_errors
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Record the name of the checkpoint to load; DCP passes it only if the user named one.

        Raises:
            NotFound: there is one process, and the model or a version of that step does not exist. With several ranks,
                DCP later raises one rank's error on all.
        """
        self._checkpoint = checkpoint_id
        if checkpoint_id is not None and not (dist.is_available() and dist.is_initialized()):
            self._find()

    @flat_errors
    def read_metadata(self, *args: Any) -> Metadata:
        """The model's tensors, each as one chunk.

        Lookups also work for entries with the prefix, or with names that wrappers extended.

        Raises:
            NotFound: the model is not registered.
        """
        self._client.describe_tensors(self.model, refresh=True)
        entries = self._entries
        return Metadata(
            _Described(entries, {name: _described(Form.plain(spec)) for name, spec in entries.model.items()}),
            planner_data={name: (name,) for name in entries.model},
        )

    @flat_errors
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Find the version. All ranks read the coordinator's version.

        Raises:
            NotFound: the version does not exist.
        """
        if is_coordinator:
            self._resolved = self._find().number
        self._checkpoint = None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The unchanged plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Send each rank the number of the version, because a ref may move meanwhile."""
        return [replace(plan, storage_data=self._resolved) for plan in plans]

    @flat_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors in the plan. Floating-point tensors whose dtype differs from the model's are cast.

        Raises:
            LayoutError: a tensor cannot receive the model's values; names each.
            WeighbridgeError: the bytes could not be fetched.
        """
        entries = self._entries
        shards: dict[tuple[str, Box], list[torch.Tensor]] = {}
        problems: dict[str, None] = {}
        targets = []
        for form, item in self._to_read(plan, planner, entries):
            check_one_box(planner, item.dest_index.fqn)
            target = planner.resolve_tensor(item)
            targets.append((item, target))
            problem = mismatch(form, form.shape, target.dtype, ALLOW)
            if problem is not None:
                problems[problem] = None
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            for part in form.parts(box):
                shards.setdefault((part.tensor, part.box), []).append(part.view(target.detach()))
        if problems:
            raise LayoutError(
                counted(len(problems), "tensor") + " cannot take what the model has", details=list(problems)
            )
        specs = [entries.model[name] for name in dict.fromkeys(name for name, _ in shards)]
        layout = Layout.stream(specs, [Shard(name, box) for name, box in shards])
        with torch.no_grad():
            filled = [of_box[0] for of_box in shards.values()]
            self.version = self._client.restore_shards(self.model, layout, filled, version=plan.storage_data)
            for first, *others in shards.values():
                for other in others:
                    other.copy_(first)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name contains a step."""
        return step_named(checkpoint_id) is not None

    @property
    def _entries(self) -> Entries:
        return Entries(TensorForms.of(self._client.describe_tensors(self.model)), self._prefix)

    def _find(self) -> Version:
        if self._checkpoint is None:
            return self._client.version(self.model, self._wanted)
        step = step_named(self._checkpoint)
        found = [each for each in self._client.versions(self.model) if each.step == step]
        if not found:
            raise NotFound(
                f"{self.model} has no version of the step in {os.fspath(self._checkpoint)!r}",
                fix="load without checkpoint_id, from WeighbridgeReader(model, version=...)",
            )
        return max(found, key=lambda each: each.number)

    def _to_read(self, plan: LoadPlan, planner: LoadPlanner, entries: Entries) -> list[tuple[Form, ReadItem]]:
        """The items of a plan with their tensors, without tied copies.

        Those are filled together with the tensors that they are tied to.
        """
        found, copies = [], []
        for item in plan.items:
            form = entries.form(item.dest_index.fqn)
            if form is None:
                copies.append(item.dest_index.fqn)
            else:
                found.append((form, item))
        alone = untied(planner, copies, entries)
        if alone and not getattr(planner, "allow_partial_load", False):
            raise NotFound(
                f"{self.model} has no {', '.join(alone)}, and it is not tied to a tensor that it has",
                fix="tie the model's weights, or load with DefaultLoadPlanner(allow_partial_load=True)",
            )
        return found


class _Described(dict[str, STORAGE_TYPES]):
    """Metadata of the model's tensors by name. Lookups accept the names that entries have in a state dict."""

    def __init__(self, entries: Entries, described: Mapping[str, STORAGE_TYPES]) -> None:
        super().__init__(described)
        self._entries = entries

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, str) and self._form(entry) is not None

    def __missing__(self, entry: str) -> STORAGE_TYPES:
        form = self._form(entry)
        if form is None:
            raise KeyError(entry)
        return _described(form)

    def _form(self, entry: str) -> Form | None:
        return self._entries.form(entry) or self._entries.tied(entry)


def _described(form: Form) -> TensorStorageMetadata:
    size = torch.Size(form.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=form.members[0].spec.dtype.torch), size, [whole])
