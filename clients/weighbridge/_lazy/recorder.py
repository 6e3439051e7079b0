"""Run a loader over lazy tensors without fetching anything, and record where it copies them.

All of the loader's operations are observed, also on tensors of its own. A result that is computed from elements of a
version, instead of copied, cannot be repeated by copying, and is reported as unrecorded. Loaders are not supported
whose choice of targets depends on the values of weights. Changes of memory by address are not observed, and neither is
another thread, unless it copies from a lazy tensor.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from weighbridge._core.boxes import Box, subtract
from weighbridge._core.layouts import TensorSpec
from weighbridge._lazy.caching import cache_folder
from weighbridge._lazy.joined import Storageless
from weighbridge._lazy.recording import Constant, RecordedCopy, RecordedStep, Recording, Shape
from weighbridge._lazy.tensor import SHAPE_ONLY, LazyTensor, changed_by
from weighbridge._lazy.views import Strided, box_of_view
from weighbridge._version import VERSION
from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)
aten = torch.ops.aten

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
"""A loader: takes names and tensors, and copies the tensors to their targets."""

_OVERWRITES = frozenset({aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
"""Operations that write to their first argument without reading it."""


_LEAVES = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
"""Operations that take elements out of torch."""


def record(specs: Iterable[TensorSpec], load: Load, targets: Mapping[str, torch.Tensor]) -> Recording:
    """Record the copies that a loader makes from a version with these tensors.

    Fetches no bytes; afterwards the content of the targets is undefined.

    Args:
        specs: the version's tensors.
        load: called once, with all of them.
        targets: the parameters and buffers that it may write to, by name; they may be on the meta device. Of several
            names for the same memory the first one counts.

    Raises:
        LayoutError: a part of a tensor was copied to a target that it does not fit; the message names the tensor.
        Exception: any error of the loader.
    """
    specs = tuple(specs)
    recorder = _Recorder(targets)
    with torch.no_grad(), recorder, _Leaving(recorder):
        load(recorder.tensors(specs))
    return recorder.finished(specs)


def remembered(
    specs: Iterable[TensorSpec], load: Load, targets: Mapping[str, torch.Tensor], configuration: str
) -> Recording:
    """`record`, or the recording of an earlier run with the same tensors, parameters and configuration: an engine that
    restarts runs no loader.

    Args:
        specs, load, targets: as for `record`.
        configuration: everything else that the loader's choices depend on: the engine and its release, its parallelism
            and this rank.
    """
    specs = tuple(specs)
    shapes = [[name, *Shape.of(tensor)[:2], str(tensor.dtype)] for name, tensor in sorted(targets.items())]
    releases = [VERSION, torch.__version__]
    known = json.dumps([[[s.name, s.dtype.name, s.shape] for s in specs], shapes, configuration, releases])
    name = f"{hashlib.sha256(known.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, UnicodeDecodeError, WeighbridgeError):
        return Recording.from_json((cache_folder() / "recordings" / name).read_text())
    made = record(specs, load, targets)
    try:
        file = cache_folder() / "recordings" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
            written.write(made.to_json())
        Path(written.name).replace(file)
    except (OSError, WeighbridgeError) as error:
        log.info("the recording was not saved for the next start: %s", error)
    return made


def is_tested(recording: Recording, configuration: str) -> bool:
    """Whether a recording was verified against the engine's own loader, as recorded by `note_tested`.

    Args:
        recording: recording of the loader.
        configuration: as for `remembered`.
    """
    name = _test_name(recording, configuration)
    with contextlib.suppress(OSError, WeighbridgeError):
        return (cache_folder() / "recordings" / name).exists()
    return False


def note_tested(recording: Recording, configuration: str) -> None:
    """Record for `is_tested` that a recording was verified, in the folder of recordings, for all processes of this
    machine.
    """
    name = _test_name(recording, configuration)
    try:
        folder = cache_folder() / "recordings"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except (OSError, WeighbridgeError) as error:
        log.info("the test of the recording was not saved for the next start: %s", error)


def _test_name(recording: Recording, configuration: str) -> str:
    said = json.dumps([recording.digest, configuration, VERSION, torch.__version__])
    return f"{hashlib.sha256(said.encode()).hexdigest()}.tested"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._given = targets
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in targets.items():
            self._targets.setdefault(_memory(tensor), (name, tensor.detach()))
        self._steps: list[RecordedStep] = []
        self._written: dict[str, list[Strided]] = {name: [] for name, _ in self._targets.values()}
        self._from: dict[int, set[str]] = {}  # memory with elements of a version: names of their tensors
        self._alive: list[torch.Tensor] = []  # keeps memory from being reused for other tensors
        self._own: dict[str, str] = {}  # targets in which the loader has put values of its own, with the reason
        self._unrecorded: dict[str, str] = {}
        self._numbers: set[str] = set()  # tensors that numbers were taken out of, since the newest was handed over
        self._handed: list[tuple[str, Callable[[], object]]] = []
        self._thread = threading.get_ident()
        self._lock = threading.RLock()

    def tensors(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """A lazy tensor for each of the specs."""
        for spec in specs:
            lazy = LazyTensor.of(spec, self)
            self._handed.append((spec.name, lazy.kept))
            self._numbers = set()
            yield spec.name, lazy

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(argument, Storageless) for argument in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)  # comes back to copy() or compute()
        return self._followed(func, args, kwargs, set())

    def copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Record a copy."""
        name = source.spec.name
        with self._lock:
            if threading.get_ident() != self._thread:
                self._exclude({name}, "it was copied in another thread, where nothing else is recorded")
            self._touched(target, {name})
            found = self._place(target)
            if found is None:
                self._exclude({name}, "it was copied to memory that belongs to no parameter")
                return
            box, view = source.located()
            if box.volume and target.numel():
                self._steps.append(RecordedCopy(*found, name, box, view, source.casts))

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation on zeros; its result is not followed."""
        names = {a.spec.name for a in tree_flatten((args, kwargs))[0] if isinstance(a, LazyTensor)}
        with self._lock:
            self._exclude(names, f"the loader uses {func} on it")
        real_args, real_kwargs = tree_map_only(LazyTensor, _zeros, (args, kwargs))
        return self._followed(func, real_args, real_kwargs, names)

    def _followed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str]) -> Any:
        """Carry out an operation on real tensors, and track which results depend on elements of a version.

        Args:
            func, args, kwargs: the operation.
            names: tensors of the version among its arguments.
        """
        result = func(*args, **kwargs)
        if func in SHAPE_ONLY or (func.is_view and not names):
            return result
        changed = _tensors(changed_by(func, args, kwargs))
        read_from = _tensors((args[1:], kwargs) if func in _OVERWRITES else (args, kwargs))
        with self._lock:
            read = names.union(*(self._from.get(_memory(tensor), ()) for tensor in read_from))
            if read:
                self._exclude(read, f"the loader computes {func} from it")
                if func is aten._local_scalar_dense.default:
                    self._numbers |= read
                for tensor in (*changed, *_tensors(result)):
                    self._touched(tensor, read)
            else:
                for tensor in changed:
                    self._set(func, tensor, args)
        return result

    def _set(self, func: Any, tensor: torch.Tensor, args: Sequence[Any]) -> None:
        """Record that a loader has put a value of its own in a target."""
        if self._numbers:  # the value may be one of these numbers
            self._touched(tensor, self._numbers)
        found = self._place(tensor)
        if found is not None and func in (aten.fill_.Scalar, aten.zero_.default):
            self._steps.append(Constant(*found, args[1] if len(args) > 1 else 0))
        elif (known := self._targets.get(_memory(tensor))) is not None:
            self._own[known[0]] = f"the loader uses {func} on its target {known[0]}"

    def _place(self, tensor: torch.Tensor) -> tuple[str, Strided] | None:
        """Target of a tensor's memory, and the part of it that the tensor is."""
        known = self._targets.get(_memory(tensor))
        if known is None or known[1].dtype != tensor.dtype:
            return None
        name, whole = known
        offset = int(tensor.storage_offset() - whole.storage_offset())
        part = Strided(tuple(tensor.shape), tuple(tensor.stride()), offset)
        self._written[name].append(part)
        return name, part

    def _touched(self, tensor: torch.Tensor, names: set[str]) -> None:
        self._from.setdefault(_memory(tensor), set()).update(names)
        self._alive.append(tensor)

    def _exclude(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._unrecorded.setdefault(name, reason)

    def finished(self, specs: Iterable[TensorSpec]) -> Recording:
        """The finished recording."""
        if any(kept() for _, kept in self._handed):
            gc.collect()
        self._exclude((name for name, kept in self._handed if kept()), "the loader has kept it")
        for key, (name, _) in self._targets.items():
            if _memory(self._given[name]) != key:
                self._own[name] = f"the loader has put other memory in place of {name}"
                if not self._written[name]:  # and it is unknown which tensors went there
                    self._exclude((spec.name for spec in specs), self._own[name])
        for step in self._steps:
            if isinstance(step, RecordedCopy) and step.target in self._own:
                self._exclude({step.tensor}, self._own[step.target])
        mixed = self._exclude_mixed()
        for name, reason in self._unrecorded.items():
            log.info("%s cannot be recorded: %s", name, reason)
        steps = [
            step
            for step in self._steps
            if step.target not in mixed and (isinstance(step, Constant) or step.tensor not in self._unrecorded)
        ]
        used = {step.tensor for step in steps if isinstance(step, RecordedCopy)}
        targets = dict(self._targets.values())
        return Recording(
            {spec.name: spec for spec in specs if spec.name in used},
            {name: Shape.of(targets[name]) for name in dict.fromkeys(step.target for step in steps)},
            tuple(steps),
            dict(self._unrecorded),
            {name: left for name, tensor in targets.items() if (left := _unwritten(tensor, self._written[name])) > 0},
        )

    def left(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's elements leave torch, where they cannot be followed and may be changed."""
        with self._lock:
            names = self._from.get(_memory(tensor), set())
            self._exclude(names, "the loader takes it out of torch")
            self._numbers |= names
            known = self._targets.get(_memory(tensor))
            if known is not None:
                self._own[known[0]] = f"the loader takes its target {known[0]} out of torch"

    def _exclude_mixed(self) -> set[str]:
        """Targets of which a part cannot be recorded: the loader would write that part before or after the rest, not in
        between. All other copies to them are excluded.
        """
        mixed: set[str] = set()
        while True:
            found = {
                name for key, (name, _) in self._targets.items() if self._from.get(key, set()) & self._unrecorded.keys()
            }
            if found == mixed:
                return mixed
            mixed = found
            for step in self._steps:
                if isinstance(step, RecordedCopy) and step.target in mixed:
                    self._exclude({step.tensor}, f"{step.target} also receives data that cannot be recorded")


class _Leaving(TorchFunctionMode):
    """Observes what no dispatch mode does: elements that leave torch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LEAVES and args and isinstance(args[0], torch.Tensor):
            self._recorder.left(args[0])
        return func(*args, **(kwargs or {}))


def _unwritten(tensor: torch.Tensor, parts: Sequence[Strided]) -> int:
    """Number of elements of a tensor that are in none of the parts."""
    total = sum(part.numel for part in parts)
    if len(parts) < 2 or total < tensor.numel() or not tensor.is_contiguous():
        return tensor.numel() - total
    located = (box_of_view(tensor.shape, part) for part in parts)
    boxes = {box for box, view in located if box.volume == view.numel}
    return sum(box.volume for box in subtract(Box.whole(tensor.shape), boxes))


def _memory(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory, also where it has no address."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without a storage, such as a sparse one
        return -id(tensor)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(found)[0] if isinstance(each, torch.Tensor)]


def _zeros(lazy: LazyTensor) -> torch.Tensor:
    return torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device=lazy.device).zero_()
