"""Distributions of tensors: a histogram of a bounded sample of a tensor's stored values, as a small picture."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Placement
from weighbridge._core.lru import Cache
from weighbridge._core.text.counts import readable_count
from weighbridge.errors import NotFound
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.memory.file_bytes import FileBytes

_PARTS = 16
_PART_BYTES = 4096
"""Bytes that are read from each of `_PARTS` evenly spaced parts of a tensor."""
_BINS = 32
_SIGMAS = 5.0
"""The picture shows this many standard deviations on each side of the mean.

Values further out count in its first or last bar.
"""
_MOST = 1e150
"""Values are clipped to this magnitude, so that their squares are finite."""
_KEPT = 2048
_WIDTH, _HEIGHT = 96, 20


@dataclass(frozen=True, slots=True)
class Distribution:
    """Histogram and statistics of a sample of values.

    Attributes:
        counts: number of values in each of `_BINS` equal intervals from ``low`` to ``high``.
        low, high: beginning of the first interval and end of the last.
        least, greatest: the extreme finite values of the sample.
        mean, sigma: mean and standard deviation of its finite values.
        sampled: number of values in the sample.
        nonfinite: number of values that are NaN or infinite.
    """

    counts: tuple[int, ...]
    low: float
    high: float
    least: float
    greatest: float
    mean: float
    sigma: float
    sampled: int
    nonfinite: int


class Distributions:
    """Pictures of the distributions of tensors, with a cache. Thread-safe; methods may wait for the store.

    Args:
        service: the service that stores the versions.
    """

    def __init__(self, service: Weighbridge) -> None:
        self._service = service
        self._known: Cache[str] = Cache(_KEPT)

    def picture(self, model: str, version: str, tensor: str) -> str:
        """A tensor's distribution as SVG.

        Raises:
            NotFound: the version does not exist, or does not contain the tensor.
            WeighbridgeError: the version cannot be read.
        """
        found = self._service.catalog.resolve(ModelName.parse(model), version)
        key = (found.model, found.number, found.create_time_ms, tensor)
        known = self._known.get(key)
        if known is not None:
            return known
        with contextlib.closing(self._service.serving.open(model, str(found.number))) as opened:
            layout = opened.files.layout
            spec = layout.tensors.get(tensor)
            place = next((each for each in layout.placements if each.shard.tensor == tensor), None)
            if spec is None or place is None:
                raise NotFound(f"{found} has no tensor {tensor[:200]!r}")
            values = sample(opened.sources[place.buffer], place, spec.dtype)
        made = svg(distribution(values))
        self._known.put(key, made)
        return made


def sample(source: FileBytes, place: Placement, dtype: DType) -> np.ndarray:
    """Values of a tensor as float64, read from at most `_PARTS` parts of it; complex values become their magnitudes."""
    import torch

    size = dtype.itemsize
    elements, part = place.nbytes // size, _PART_BYTES // size
    if elements <= _PARTS * part:
        ranges = [(0, elements)] if elements else []
    else:
        ranges = [((elements - part) * index // (_PARTS - 1), part) for index in range(_PARTS)]
    raw = b"".join(bytes(source.read(place.offset + start * size, length * size)) for start, length in ranges)
    if not raw:
        return np.empty(0)
    values = torch.frombuffer(bytearray(raw), dtype=dtype.torch)
    real = values.abs() if values.is_complex() else values
    found: np.ndarray = real.to(torch.float64).numpy()
    return found


def distribution(values: np.ndarray) -> Distribution:
    """Distribution of the finite values of a one-dimensional float64 array."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Distribution((0,) * _BINS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, values.size, values.size)
    least, greatest = float(finite.min()), float(finite.max())
    finite = np.clip(finite, -_MOST, _MOST)
    mean, sigma = float(finite.mean()), float(finite.std())
    low, high = max(least, mean - _SIGMAS * sigma), min(greatest, mean + _SIGMAS * sigma)
    if not low < high:
        low, high = mean - max(abs(mean), 1.0) / 2, mean + max(abs(mean), 1.0) / 2
    counts, _ = np.histogram(np.clip(finite, low, high), bins=_BINS, range=(low, high))
    return Distribution(
        tuple(int(each) for each in counts),
        low,
        high,
        least,
        greatest,
        mean,
        sigma,
        int(values.size),
        int(values.size - finite.size),
    )


def svg(found: Distribution) -> str:
    """A distribution as an SVG picture, legible on light and dark backgrounds.

    Its title contains the same facts as text.
    """
    most, width = max((*found.counts, 1)), _WIDTH / _BINS
    bars = "".join(
        f'<rect x="{index * width:g}" y="{_HEIGHT - height:.1f}" width="{width - 0.6:g}" height="{height:.1f}"/>'
        for index, count in enumerate(found.counts)
        if (height := max(0.8, (_HEIGHT - 1) * count / most)) and count
    )
    zero = ""
    if found.low < 0 < found.high:
        x = _WIDTH * -found.low / (found.high - found.low)
        zero = f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="#d9822b" stroke-width="0.8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<title>{said(found)}</title><g fill="#6b8fc9">{bars}</g>{zero}</svg>'
    )


def said(found: Distribution) -> str:
    """A distribution as text."""
    odd = f", {readable_count(found.nonfinite)} not finite" if found.nonfinite else ""
    return (
        f"{found.least:.4g} to {found.greatest:.4g}, mean {found.mean:.3g}, standard deviation {found.sigma:.3g}; "
        f"{readable_count(found.sampled)} values sampled{odd}"
    )
