"""Target: a parser under test, with its samples, the errors that it may raise, and what one input may cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

Parse: TypeAlias = Callable[[bytes], object]
Mutator: TypeAlias = Callable[[random.Random, bytes], bytes]

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the cost of one input: a constant, and a part in proportion to its length, so that work that is more
    than linear shows.

    Attributes:
        seconds: seconds of processor time, whatever the length.
        seconds_per_mb: seconds of processor time for each MiB of the input.
        mb: MiB by which the process's peak of memory may grow, whatever the length.
        times: bytes for each byte of the input. JSON has some thirty: ``{},`` is an empty dict.
    """

    seconds: float = 1.0
    seconds_per_mb: float = 4.0
    mb: float = 48.0
    times: float = 64.0

    def problem(self, length: int, seconds: float, grown: float) -> str:
        """Limit that an input of so many bytes exceeds, ``time`` or ``memory``; empty if none. ``grown`` is in MiB."""
        if seconds > self.seconds + self.seconds_per_mb * length / MB:
            return "time"
        if grown > self.mb + self.times * length / MB:
            return "memory"
        return ""


@dataclass(frozen=True)
class Target:
    """A parser under test.

    Attributes:
        name: name of the target.
        start: gives the parser for as long as a block runs; what it raises at the block's end is a finding.
        samples: valid inputs, as the project's own writers make them.
        mutate: changes an input in ways that know its structure.
        refusals: the errors that the parser documents.
        heavy: inputs of many megabytes that once did, or could, cost more than their length allows.
        bounds: limits on the cost of one input.
        longest: bytes of a mutated input.
        weight: its part of all inputs, next to others: less for what takes milliseconds.
        stateful: whether an input's outcome depends on those before it, so that it cannot be made smaller alone.
    """

    name: str
    start: Callable[[], AbstractContextManager[Parse]]
    samples: Callable[[], Sequence[bytes]]
    mutate: Mutator
    refusals: tuple[type[BaseException], ...]
    heavy: Callable[[], Iterable[bytes]] = tuple
    bounds: Bounds = Bounds()
    longest: int = 1 << 16
    weight: float = 1.0
    stateful: bool = False


def stateless(parse: Parse) -> Callable[[], AbstractContextManager[Parse]]:
    """The `Target.start` of a function that needs nothing but its input."""

    @contextmanager
    def start() -> Iterator[Parse]:
        yield parse

    return start


def inputs(target: Target, seed: int, samples: Sequence[bytes] | None = None) -> Iterator[bytes]:
    """The samples of a target, then endless mutations of them; the same seed gives the same ones."""
    choose = random.Random(seed)
    samples = target.samples() if samples is None else samples
    yield from samples
    while True:
        data = choose.choice(samples)
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            data = target.mutate(choose, data)
        yield data[: target.longest]
