"""Golden prompts: token ids with the log probabilities that the trainer's model gives them, in a version's metadata or
in a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge._core.json_values import JsonValue
from weighbridge._core.metadata import MAX_BYTES, Metadata, MetadataValue
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument, WeighbridgeError

__all__ = ["GoldenPrompt"]

PROMPTS, BOUND = "weighbridge.golden", "weighbridge.max_drift"
"""Keys of a version's metadata: golden prompts, as a JSON array of pairs of arrays; and the maximum drift that they
allow.
"""
MOST_PROMPTS = 16
MOST_TOKENS = 256
"""Maximum number of tokens of one prompt. Metadata can hold about 250 tokens of all prompts together."""
_MOST_TOKEN = 2**31 - 1
_DIGITS = 5
_ABOVE_ZERO = 0.001
"""Largest accepted log probability. It is above 0, because a rounded softmax may be slightly above 1."""
_MOST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class GoldenPrompt(JsonValue):
    """Prompt with the log probabilities that the trainer's model gives its tokens.

    Attributes:
        tokens: 2 to 256 token ids.
        logprobs: natural logarithm of the probability that the model gives each token after the first, given all tokens
            before it; one fewer than tokens. They are stored with five digits after the decimal point.

    Raises:
        InvalidArgument: the number of tokens or log probabilities is wrong, or one of them is invalid (names it).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens = tuple(self.tokens)
        if not 2 <= len(tokens) <= MOST_TOKENS:
            raise InvalidArgument(f"a golden prompt has {counted(len(tokens), 'token')}", fix=f"use 2 to {MOST_TOKENS}")
        if len(self.logprobs) != len(tokens) - 1:
            raise InvalidArgument(
                (
                    f"a golden prompt of {len(tokens)} tokens has "
                    f"{counted(len(self.logprobs), 'log probability', 'log probabilities')}"
                ),
                fix="give one for each token after the first",
            )
        for at, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token <= _MOST_TOKEN:
                raise InvalidArgument(
                    f"token {at} of a golden prompt is {shown(token)}", fix="give ids as int, from 0 on"
                )
        logprobs = tuple(_logprob(at + 1, each) for at, each in enumerate(self.logprobs))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "logprobs", logprobs)


def _logprob(at: int, value: object) -> float:
    number = _number(value) if _is_number(value) else math.nan
    if not math.isfinite(number):
        raise InvalidArgument(
            f"the log probability of token {at} of a golden prompt is {shown(value)}",
            fix=(
                "give a finite float, of a tensor its tolist(); leave out prompts whose tokens "
                "the model gives no probability"
            ),
        )
    if number > _ABOVE_ZERO:
        raise InvalidArgument(
            f"the log probability of token {at} of a golden prompt is {number:g}, above 0",
            fix="give natural logarithms of probabilities: torch.log_softmax of the logits before the token",
        )
    return min(round(number, _DIGITS), 0.0)


@dataclass(frozen=True, slots=True)
class GoldenPrompts(JsonValue):
    """Golden prompts of one version.

    Attributes:
        prompts: 1 to 16 prompts.
        max_drift: maximum difference between an engine's log probabilities and these; None if the version does not set
            a bound.
    """

    prompts: tuple[GoldenPrompt, ...]
    max_drift: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompts) <= MOST_PROMPTS:
            raise InvalidArgument(f"there are {len(self.prompts)} golden prompts", fix=f"give 1 to {MOST_PROMPTS}")
        check_bound(self.max_drift)

    @property
    def text(self) -> str:
        """The number of prompts and of their tokens, as text."""
        tokens = sum(len(each.tokens) for each in self.prompts)
        return f"{counted(len(self.prompts), 'prompt')} of {counted(tokens, 'token')}"

    def metadata(self) -> dict[str, MetadataValue]:
        """Return the prompts as entries of a version's metadata.

        Raises:
            InvalidArgument: the prompts are too large for the metadata of a version.
        """
        pairs = [[each.tokens, each.logprobs] for each in self.prompts]
        text = json.dumps(pairs, separators=(",", ":"))
        if len(text) > MAX_BYTES - len(PROMPTS) - len(BOUND) - 32:
            raise InvalidArgument(
                (
                    f"golden prompts ({self.text}) have {len(text)} bytes, and all metadata of a "
                    f"version may have {MAX_BYTES}"
                ),
                fix="give fewer or shorter ones: about 250 tokens fit together",
            )
        return {PROMPTS: text, **({} if self.max_drift is None else {BOUND: self.max_drift})}

    @staticmethod
    def from_metadata(metadata: Metadata) -> GoldenPrompts | None:
        """Return the golden prompts of a version; None if it does not have any.

        Raises:
            InvalidArgument: the values under the two keys are not golden prompts.
        """
        if PROMPTS not in metadata:
            return None
        found = metadata[PROMPTS]
        try:
            pairs = json.loads(found) if isinstance(found, str) else None
            prompts = tuple(GoldenPrompt(tuple(tokens), tuple(logprobs)) for tokens, logprobs in pairs)  # type: ignore[union-attr]
            return GoldenPrompts(prompts, _number(metadata.get(BOUND)))
        except WeighbridgeError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"the metadata {PROMPTS} is {shown(found)}, not golden prompts",
                fix="push them as golden=...",
            ) from error

    @staticmethod
    def read(path: str | os.PathLike[str]) -> GoldenPrompts:
        """Read golden prompts from a JSON file with ``prompts``, an array of objects with ``tokens`` and ``logprobs``,
        and optionally ``max_drift``.

        Raises:
            InvalidArgument: the file does not contain golden prompts.
            OSError: the file cannot be read.
        """
        with Path(path).open("rb") as file:
            content = file.read(_MOST_FILE + 1)
        try:
            found: Any = json.loads(content)
            prompts = tuple(GoldenPrompt(tuple(each["tokens"]), tuple(each["logprobs"])) for each in found["prompts"])
            return GoldenPrompts(prompts, _number(found.get("max_drift")))
        except WeighbridgeError as error:
            raise InvalidArgument(f"{path}: {error.message}", fix=error.fix) from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} has no golden prompts: {error!r}"[:300],
                fix="let weighbridge golden --make write it",
            ) from error


def golden_of(
    golden: Sequence[GoldenPrompt] | GoldenPrompts | str | os.PathLike[str] | None, max_drift: float | None
) -> GoldenPrompts | None:
    """Return the golden prompts that a caller gives, as prompts or as the path of a file; None if the caller does not
    give any.

    Raises:
        InvalidArgument: the file does not contain golden prompts, or the caller gives a bound without prompts.
        OSError: the file cannot be read.
    """
    if golden is None:
        if max_drift is not None:
            raise InvalidArgument("max_drift applies only to golden prompts, and there are none", fix="pass golden=...")
        return None
    if isinstance(golden, str | os.PathLike):
        golden = GoldenPrompts.read(golden)
    if not isinstance(golden, GoldenPrompts):
        for each in golden:
            if not isinstance(each, GoldenPrompt):
                raise InvalidArgument(
                    f"a golden prompt is a {type(each).__name__}", fix="use GoldenPrompt(tokens, logprobs)"
                )
        golden = GoldenPrompts(tuple(golden))
    return golden if max_drift is None else GoldenPrompts(golden.prompts, max_drift)


def check_bound(max_drift: float | None) -> None:
    """Raise InvalidArgument unless the value is a bound on drift or None."""
    if max_drift is not None and not (_is_number(max_drift) and 0.0 <= max_drift < math.inf):
        raise InvalidArgument(
            f"the bound of drift is {shown(max_drift)}",
            fix="give a difference of log probabilities, such as 0.05",
        )


def readable_metadata(metadata: Metadata) -> Mapping[str, MetadataValue]:
    """Return metadata for display. Golden prompts are replaced by their number, because their JSON is not readable."""
    if PROMPTS not in metadata:
        return metadata
    try:
        found = GoldenPrompts.from_metadata(metadata)
    except InvalidArgument:
        return metadata
    return {**metadata, PROMPTS: "" if found is None else found.text}


def logprobs_text(logprobs: Iterable[float]) -> str:
    """Return the mean of log probabilities as text."""
    found = tuple(logprobs)
    return f"{math.fsum(found) / len(found):.3f}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> Any:
    """Return a number as a float; infinite beyond the range of float.

    Other values are returned unchanged, and `check_bound` refuses them.
    """
    try:
        return float(value) if _is_number(value) else value  # type: ignore[arg-type]
    except OverflowError:  # JSON allows integers of any size
        return math.inf
