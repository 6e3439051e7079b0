"""Shares of tensors that all ranks of a framework gather: whole tensors, one after another, each freed when the next
one is requested.

Every rank receives the same tensors and copies its share of each. So all ranks together copy each gathered tensor once,
concurrently, and no rank holds more than the tensor that it is receiving.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats import peft_models
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.misfits import Misfit, check_prefix, told
from weighbridge._formats.naming.parameter_names import check_merged
from weighbridge._formats.tensor_stream import written_as
from weighbridge._formats.torch_state import (
    check_cast,
    misfit,
    model_form,
    not_dense,
    unknown_names,
)
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

LEAST_SHARE_BYTES = 256 << 10
"""Minimum bytes of a rank's share of a tensor, because the overhead of smaller copies is too large."""
_WORD_BYTES = 8
_WORDS_AT_ONCE = 1 << 22


def share_layout(tensors: Mapping[str, TensorSpec], rank: int, ranks: int) -> Layout:
    """The share of one rank: rows of large tensors, and some whole small ones.

    The shares of all ranks together are the model.

    Args:
        tensors: the model's, by name; in the same order on all ranks.
        rank: the rank, from 0.
        ranks: number of ranks.
    """
    shards = []
    turn = 0
    for spec in tensors.values():
        rows = spec.shape[0] if spec.shape else 1
        count = max(min(ranks, rows, spec.nbytes // LEAST_SHARE_BYTES), 1)
        part = (rank - turn) % ranks
        if part < count and not spec.shape:
            shards.append(Shard(spec.name, Box((), ())))
        elif part < count:
            first, last = part * rows // count, (part + 1) * rows // count
            offset, extent = (0,) * (len(spec.shape) - 1), spec.shape[1:]
            shards.append(Shard(spec.name, Box((first, *offset), (last - first, *extent))))
        turn = (turn + count) % ranks
    return Layout.stream([tensors[shard.tensor] for shard in shards], shards)


def held_layout(tensors: TensorForms, names: Iterable[str]) -> Layout:
    """Layout of whole tensors that not all ranks receive.

    Args:
        tensors: the model's.
        names: names of those that this rank receives; unknown names are ignored.
    """
    forms = (model_form(name, tensors) for name in names)
    held = dict.fromkeys(name for form in forms if form is not None for name in form.tensors)
    specs = [tensors[name] for name in held]
    return Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])


class Passing(NamedTuple):
    """Shards that stay valid until the next ones are requested.

    Attributes:
        indexes: indexes of their placements in the stream.
        tensors: one for each, of the extent of its box.
    """

    indexes: Sequence[int]
    tensors: Sequence[torch.Tensor]


class GatheredShards:
    """Shards that a rank pushes, of tensors that arrive one after another. They can be iterated once.

    Names are interpreted as in `push_state_dict`. Rotary frequencies are left out, and so are copies of tied tensors,
    after a comparison of their bytes.

    Args:
        weights: ``(name, tensor)`` pairs, of the whole tensors.
        model: its tensors, by name.
        stream: layout of the shards.
        rank, ranks: this rank, and the number of ranks, among those that receive the same tensors.
        cast: as for `torch_shards`.
        expected: names of the model's tensors that must arrive; by default all of them.
    """

    def __init__(
        self,
        weights: Iterator[Any],
        model: TensorForms,
        stream: Layout,
        *,
        rank: int,
        ranks: int,
        cast: str,
        expected: Collection[str] | None = None,
    ) -> None:
        check_cast(cast)
        self._weights = weights
        self._model = model
        self._stream = stream
        self._expected = model if expected is None else expected
        self._cast = cast
        self._casts: dict[str, bool] = {}
        self._found: set[str] = set()
        self._problems: list[Misfit] = []
        self._ties = _Ties(model, self._expected, rank, ranks)

    @property
    def casts(self) -> tuple[int, int]:
        """Number of tensors that were cast, and number of exact casts among these; final once all tensors have
        arrived.
        """
        return len(self._casts), sum(self._casts.values())

    def parts(self) -> Iterator[Passing]:
        """The shards, as their tensors arrive.

        Raises:
            LayoutError: raised after all have arrived, if names, shapes or dtypes contradict the model, or tensors are
                missing; names each.
        """
        for given in self._weights:
            yield from self._given(given)
            del given  # so that it can be freed before the next one is gathered
        self._check()

    def _given(self, given: Any) -> Iterator[Passing]:
        match given:
            case (str(name), value):
                yield from self._taken(name, value)
            case _:
                self._problems.append(Misfit(f"a {type(given).__name__} is not a pair of a name and a tensor"))

    def _taken(self, given_name: str, value: Any) -> Iterator[Passing]:
        import torch

        form = model_form(given_name, self._model)
        if not isinstance(value, torch.Tensor):
            self._problems.append(Misfit(f"{given_name} is a {type(value).__name__}, not a tensor"))
        elif hasattr(value, "full_tensor"):
            alike = "DTensors; push their shards with push_state_dict"
            self._problems.append(
                Misfit(
                    f"{given_name} is a DTensor; push its shards with push_state_dict",
                    f"are {alike}",
                    given_name,
                )
            )
        elif value.is_meta:
            alike = "on the meta device, without data"
            self._problems.append(Misfit(f"{given_name} is {alike}", f"are {alike}", given_name))
        elif (sparse := not_dense(given_name, value)) is not None:
            self._found.update(() if form is None else form.tensors)
            self._problems.append(sparse)
        elif form is None:
            self._ties.unknown(given_name, value)
        elif not self._found.isdisjoint(form.tensors):
            self._problems.append(Misfit(f"{form.name} is given twice"))
        else:
            self._found.update(form.tensors)
            problem = misfit(form, tuple(value.shape), value.dtype, self._cast)
            if problem:
                self._problems.append(problem)
                return
            self._ties.known(form.name, value)
            swapped = form.is_swapped(value.shape)
            indexes: list[int] = []
            tensors: list[torch.Tensor] = []
            for part in form.parts(Box.whole(tuple(value.shape)), swapped=swapped):
                for index in self._stream.by_tensor.get(part.tensor, ()):
                    box = self._stream.placements[index].shard.box
                    rows = slice(box.offset[0], box.end[0]) if box.offset else ...
                    indexes.append(index)
                    tensors.append(part.view(value.detach())[rows])
                spec = self._model[part.tensor]
                if written_as(spec, value) != value.dtype:
                    self._casts[part.tensor] = dtypes.from_torch(value.dtype).widens_to(spec.dtype)
            if indexes:
                yield Passing(indexes, tensors)

    def _check(self) -> None:
        problems = self._problems
        names = self._ties.unmatched()
        check_merged(names, peft_models.RECIPE)
        check_prefix(names, self._model)
        problems += unknown_names(names, self._model)
        problems += [Misfit(f"{self._model[name]} is missing") for name in self._expected if name not in self._found]
        if problems:
            raise LayoutError(
                f"the tensors differ from those of the model in {counted(len(problems), 'entry', 'entries')}",
                details=first_lines(told(problems)),
                fix="pass exactly the tensors of the model's safetensors files, whole, with the same names and shapes",
            )


class _Ties:
    """Tests whether tensors with names that the model does not have are copies of its embedding, that is, a tied head.

    Each rank compares a share of the rows, so that all ranks together compare everything. A model with a separate head
    has no tied head. If the embedding is on another rank, such as the first of several pipeline stages, every tensor of
    its shape counts as a copy.
    """

    def __init__(self, model: Mapping[str, TensorSpec], expected: Collection[str], rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        # embeddings have a row for each token, more than any other tensor
        tables = [spec for spec in model.values() if len(spec.shape) == 2]
        tokens = max((spec.shape[0] for spec in tables), default=0)
        longest = [spec for spec in tables if spec.shape[0] == tokens]
        self._embedding = longest[0] if len(longest) == 1 else None
        self._elsewhere = self._embedding is not None and self._embedding.name not in expected
        self._given: _Digest | None = None
        self._unknown: list[tuple[str, _Digest | None]] = []

    def known(self, name: str, value: torch.Tensor) -> None:
        """Record a tensor that the model has."""
        if self._embedding is not None and name == self._embedding.name:
            self._given = self._digest(value)

    def unknown(self, name: str, value: torch.Tensor) -> None:
        """Record a tensor that the model does not have."""
        if not name.endswith("inv_freq"):
            alike = self._embedding is not None and tuple(value.shape) == self._embedding.shape
            if alike and self._elsewhere:
                return
            self._unknown.append((name, self._digest(value) if alike else None))

    def unmatched(self) -> list[str]:
        """Names of the recorded tensors that are not copies."""
        given = None if self._given is None else self._given.value()
        return [name for name, digest in self._unknown if digest is None or digest.value() != given]

    def _digest(self, value: torch.Tensor) -> _Digest:
        rows = value.shape[0]
        share = value.detach()[self._rank * rows // self._ranks : (self._rank + 1) * rows // self._ranks]
        return _Digest.of(share.contiguous())


@dataclass(frozen=True, slots=True)
class _Digest:
    """Digest of a tensor: XXH3 of its bytes; on a GPU, sums of its words with random weights, which no thread waits for
    until they are compared.
    """

    dtype: torch.dtype
    found: bytes | torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> _Digest:
        """The digest of a contiguous tensor."""
        import torch

        octets = tensor.view(-1).view(torch.uint8)
        if not tensor.is_cuda or octets.numel() % _WORD_BYTES:
            return _Digest(tensor.dtype, xxhash.xxh3_128_digest(octets.cpu().numpy().data))
        return _Digest(tensor.dtype, _sums(octets))

    def value(self) -> object:
        """Value that is equal for equal tensors."""
        found = self.found if isinstance(self.found, bytes) else tuple(self.found.tolist())
        return self.dtype, found


def _sums(octets: torch.Tensor) -> torch.Tensor:
    """Sums of the words of a tensor with random weights, which are the same each time.

    Args:
        octets: its bytes, of whole words.
    """
    import torch

    if octets.storage_offset() % _WORD_BYTES:  # of a tensor that was packed with others
        octets = octets.clone()
    words = octets.view(torch.int64)
    random = torch.Generator(words.device).manual_seed(0)
    weights = torch.randint(
        -(1 << 63),
        (1 << 63) - 1,
        (min(len(words), _WORDS_AT_ONCE),),
        device=words.device,
        generator=random,
    )
    sums = [(part * weights[: len(part)]).sum() for part in words.split(_WORDS_AT_ONCE)]  # type: ignore[no-untyped-call]
    return torch.stack(sums) if sums else words


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingWeights:
    """Whole tensors that will arrive, before it is known which shards of them the rank pushes.

    Attributes:
        weights, model, rank, ranks, cast, expected: as for `GatheredShards`.
        buffer_bytes: host memory for the part of the shards that is sent over gRPC.
    """

    weights: Iterator[Any]
    model: TensorForms
    rank: int
    ranks: int
    cast: str
    expected: Collection[str] | None
    buffer_bytes: int

    def passing(self, stream: Layout) -> GatheredShards:
        """The shards with this layout, as they arrive."""
        return GatheredShards(
            self.weights,
            self.model,
            stream,
            rank=self.rank,
            ranks=self.ranks,
            cast=self.cast,
            expected=self.expected,
        )
