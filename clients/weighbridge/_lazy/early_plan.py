"""Plan of early staging: the parameters that can be staged one by one, and the rows of bytes that fill each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from weighbridge._lane.loans import ReadLoan
from weighbridge._lazy.recording import RecordedCopy, Recording
from weighbridge._lazy.staging import StagingPlace, flat
from weighbridge._memory.byte_rows import SOURCE, Rows, rows_of
from weighbridge._memory.strided import ShardCopies
from weighbridge._memory.word_sums import as_words, words_of


@dataclass(frozen=True, eq=False)
class EarlyPlan:
    """Plan for all versions with the same layout in the service's memory. Parameters are identified by their numbers.

    Attributes:
        copies: locations of the slices, as in `ReadLoan.copies`.
        recording: recording of the engine's loader.
        names: names of the parameters: those that boxes fill completely, without cast or rearrangement.
        words: words of each parameter in the place.
        nbytes: bytes of each parameter.
        slices: indexes of the slices that fill the parameters, grouped by parameter.
        first_slices: index in `slices` of each parameter's first one.
        rows: copies that fill the parameters; sources are offsets in memories.
        memories: number of the memory, for each of the rows.
        owners: parameter, for each of the rows.
        row_words: bytes of the words whose sums are compared, for each of the rows.
    """

    copies: Sequence[ShardCopies]
    recording: Recording
    names: Sequence[str]
    words: Sequence[torch.Tensor]
    nbytes: NDArray[np.int64]
    slices: NDArray[np.int64]
    first_slices: NDArray[np.int64]
    rows: Rows
    memories: NDArray[np.int64]
    owners: NDArray[np.int64]
    row_words: NDArray[np.int64]

    @staticmethod
    def of(recording: Recording, loan: ReadLoan, place: StagingPlace) -> EarlyPlan:
        """Plan for the versions with the layout of a loan.

        Args:
            recording: recording of the engine's loader.
            loan: loan of a version, by the recording's request.
            place: place in which parameters are staged.
        """
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        slices: list[tuple[int, ...]] = []
        rows: list[Rows] = []
        memories: list[NDArray[np.int64]] = []
        for name, tensor in place.tensors(recording.whole).items():
            copies = recording.plain.get(name, ())
            indexes = tuple(recording.boxes[copy.tensor, copy.box] for copy in copies)
            found = _rows_of_parameter(tensor, copies, [loan.copies[index] for index in indexes])
            if found is None:
                continue
            names.append(name)
            tensors.append(flat(tensor))
            slices.append(indexes)
            rows.append(found[0])
            memories.append(found[1])
        words = [int(np.gcd.reduce(words_of(each))) for each in rows]
        counts = [len(each) for each in rows]
        return EarlyPlan(
            loan.copies,
            recording,
            names,
            [as_words(tensor, word) for tensor, word in zip(tensors, words, strict=True)],
            np.array([tensor.nbytes for tensor in tensors], np.int64),
            np.array([index for each in slices for index in each], np.int64),
            np.cumsum([0, *(len(each) for each in slices)])[:-1],
            np.concatenate([np.empty((0, 6), np.int64), *rows]),
            np.concatenate([np.empty(0, np.int64), *memories]),
            np.arange(len(names)).repeat(counts),
            np.array(words, np.int64).repeat(counts),
        )

    def rows_at(self, addresses: Sequence[int]) -> Rows:
        """The rows for a version whose memories have these addresses."""
        found = self.rows.copy()
        if len(found):
            found[:, SOURCE] += np.array(addresses, np.int64)[self.memories]
        return found


_last: WeakKeyDictionary[StagingPlace, EarlyPlan] = WeakKeyDictionary()
"""Plan of the last version that was staged in each place."""


def plan_for(recording: Recording, loan: ReadLoan, place: StagingPlace) -> EarlyPlan:
    """Plan for a version: that of the previous version in the same place, if both have the same layout in memory."""
    known = _last.get(place)
    if known is None or known.copies is not loan.copies or known.recording is not recording:
        known = _last[place] = EarlyPlan.of(recording, loan, place)
    return known


def _rows_of_parameter(
    tensor: torch.Tensor, copies: Sequence[RecordedCopy], slices: Sequence[ShardCopies]
) -> tuple[Rows, NDArray[np.int64]] | None:
    """Rows that fill a parameter from its slices, and the memory of each; None if they leave bytes out, or copy engines
    cannot copy them.
    """
    nbytes = sum(each.nbytes for shard in slices for each in shard)
    if not copies or nbytes != flat(tensor).nbytes:
        return None
    rows: list[Rows] = []
    memories: list[int] = []
    for copy, shard in zip(copies, slices, strict=True):
        files = [each.file for each in shard]
        found = rows_of(shard, tensor.data_ptr() + copy.part.offset * tensor.itemsize, [0] * (max(files) + 1))
        if found is None:
            return None
        rows.append(found)
        memories += np.repeat(files, [len(steps) for steps in shard.steps or ()]).tolist()
    return np.concatenate(rows), np.array(memories, np.int64)
