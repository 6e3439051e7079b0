"""Digests of parameters, by the recording of an engine's loader: of the present parameters, and of those that a version
should result in.

A digest is computed on the tensor's device. It depends on each word and on its position, so that a flipped bit and two
swapped experts change it (two digests agree by chance once in 2**64). It does not protect against an attacker who
chooses the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from weighbridge._lazy.recording import Constant, Recording
from weighbridge._lazy.staging import part_of
from weighbridge._lazy.tensor import shown

Digests = Mapping[str, Sequence[int]]
"""For each parameter by name, the digests of the parts that a loader writes, in the order of its steps."""

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TURN = 0x2545F4914F6CDD1D
"""Odd factor that distinguishes groups of rows."""
_ROW = 1 << 16
"""Words that have weights of their own."""
_ROWS_AT_ONCE = 128
"""Rows of 512 KiB that are weighted at a time, in a copy."""
_TOGETHER_WORDS = 3 << 20
"""Most words of tensors of one size that are digested together: submitting the work of a tensor to a GPU takes some 0.1
ms. They are copied, and weighted as 8 bytes each, so that less memory is needed than for the rows of one large
tensor.
"""


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor's elements in row-major order, an ``int64`` on its device; does not wait for the device.

    Args:
        tensor: of any dtype and device; the digest depends on its bytes, and not on its strides.
    """
    return _digests([tensor])[0]


def _digests_in_order(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Digest of each tensor; tensors of one size are digested together."""
    given = list(tensors)
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(given):
        alike.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(index)
    made: list[tuple[list[int], torch.Tensor]] = []
    for indexes in alike.values():
        nbytes = given[indexes[0]].nbytes
        count = max(_TOGETHER_WORDS * math.gcd(nbytes, 8) // max(nbytes, 1), 1)
        for start in range(0, len(indexes), count):
            some = indexes[start : start + count]
            made.append((some, _digests([given[index] for index in some])))
    found = [0] * len(given)
    for some, digests in made:  # all are submitted before the first is waited for
        for index, digest in zip(some, digests.tolist(), strict=True):
            found[index] = digest
    return found


def _digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of tensors of one size, dtype and device; does not wait for the device."""
    first = tensors[0].detach().reshape(-1)
    if not first.numel():
        return torch.zeros(len(tensors), dtype=torch.int64, device=first.device)
    if len(tensors) > 1:
        together = torch.stack([tensor.detach().reshape(-1) for tensor in tensors])
    elif first.stride(0) != 1 or first.data_ptr() % 8:
        together = first.clone(memory_format=torch.contiguous_format)[None]
    else:
        together = first[None]
    words = together.view(torch.uint8).view(_WORD[math.gcd(first.nbytes, 8)])
    weights = _weights(words.device)
    count = words.shape[1] // _ROW
    rows = words[:, : count * _ROW].view(len(tensors), count, _ROW)
    sums = [(rows[:, start : start + _ROWS_AT_ONCE] * weights).sum(2) for start in range(0, count, _ROWS_AT_ONCE)]
    rest = words[:, count * _ROW :].to(torch.int64)
    sums.append((rest * weights[: rest.shape[1]]).sum(1, keepdim=True))
    return _sums_of_rows(torch.cat(sums, 1), weights)


def _sums_of_rows(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Digests of sums of rows, for any number of rows."""
    total = torch.zeros(len(sums), dtype=torch.int64, device=sums.device)
    for start in range(0, sums.shape[1], _ROW):
        part = sums[:, start : start + _ROW]
        total = total * _TURN + (part * weights[-part.shape[1] :]).sum(1)
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """An odd number for each word of a row. Source: SplitMix64, Steele, Lea and Flood 2014."""
    state = (np.arange(1, _ROW + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


def digests_of(recording: Recording, parameters: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Digests of the present parameters, each in the parts in which a loader writes it.

    Args:
        recording: recording of the loader.
        parameters: some of its targets, by name, as they were recorded.
    """
    with torch.no_grad():
        digests = iter(
            _digests_in_order(
                part_of(tensor, step.part) for name, tensor in parameters.items() for step in recording.by_target[name]
            )
        )
    return {name: [next(digests) for _ in recording.by_target[name]] for name in parameters}


def whole_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Digest of each tensor as a whole, by name."""
    with torch.no_grad():
        return dict(zip(tensors, _digests_in_order(tensors.values()), strict=True))


def expected_digests(recording: Recording, slices: Iterator[torch.Tensor]) -> dict[str, list[int]]:
    """Digests that parameters have if they hold a version, made from the version's own bytes.

    Args:
        recording: recording of the loader.
        slices: slices of ``recording.request``, in order, contiguous and in host memory; one is held at a time.
    """
    by_slice: dict[int, list[tuple[str, int]]] = {}
    found: dict[str, list[int]] = {name: [0] * len(steps) for name, steps in recording.by_target.items()}
    for name, steps in recording.by_target.items():
        for at, step in enumerate(steps):
            if isinstance(step, Constant):
                dtype = recording.targets[name].dtype
                found[name][at] = int(digest_of(torch.full(step.part.size, step.value, dtype=dtype)))
            else:
                by_slice.setdefault(recording.boxes[step.tensor, step.box], []).append((name, at))
    for index, tensor in enumerate(slices):
        for name, at in by_slice.get(index, ()):
            step = recording.by_target[name][at]
            if not isinstance(step, Constant):
                part = shown(tensor, step.view, step.casts).to(recording.targets[name].dtype)
                found[name][at] = int(digest_of(part))
    return found


def differing(expected: Digests, found: Digests) -> list[str]:
    """Names of the parameters whose digests differ from the expected ones."""
    return [name for name, digests in found.items() if list(expected.get(name, ())) != list(digests)]
