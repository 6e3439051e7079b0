"""What the service says about models and versions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weighbridge.errors import InvalidArgument

_MOST = 2**53
REF_LIVE = "live"
"""The newest version that is complete; it may not be verified or in the object store yet."""
REF_LATEST = "latest"
"""The newest version in the object store. It names one for ever, and what it has named goes only if the retention lets it."""


class VersionState(enum.Enum):
    """Where a version is in its life. Who may rely on what is in docs/design.md."""

    OPEN = "open"
    """The number is given; not all ranks have declared, or there is no memory for it yet."""
    RECEIVING = "receiving"
    """The plan is made and bytes arrive."""
    READY = "ready"
    """Complete: every byte is in the memory of a live replica, and nobody can write to it."""
    VERIFIED = "verified"
    """Digests were made of these bytes, and a sample was compared with what ranks sent."""
    DURABLE = "durable"
    """In the object store and part of history; verified, too."""
    FAILED = "failed"
    """Given up before it was visible, or lost before it was durable."""
    ABORTED = "aborted"
    """Given up because somebody asked for it."""
    RETIRED = "retired"
    """Taken out of history; those who know its number can read it until the grace time is over."""

    @property
    def visible(self) -> bool:
        """Whether engines can pull it."""
        return self in (VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE, VersionState.RETIRED)

    @property
    def stored(self) -> bool:
        """Whether it can be read from the object store."""
        return self in (VersionState.DURABLE, VersionState.RETIRED)

    @property
    def given_up(self) -> bool:
        """Whether it will never be complete, or was lost."""
        return self in (VersionState.FAILED, VersionState.ABORTED)

    def reached(self, wanted: VersionState) -> bool:
        """Whether a version in this state has come as far as ``wanted``; never if either is a state of one that was given up."""
        return self in _ORDER and wanted in _ORDER and _ORDER.index(self) >= _ORDER.index(wanted)


_ORDER = (
    VersionState.OPEN,
    VersionState.RECEIVING,
    VersionState.READY,
    VersionState.VERIFIED,
    VersionState.DURABLE,
    VersionState.RETIRED,
)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model.

    Attributes:
        model: ``namespace/name``.
        number: unique and increasing within the model.
        state: where it is in its life.
        step: the trainer's step.
        run: the trainer's run.
        ranks: trainer ranks that push it.
        sealed_ranks: ranks that have pushed all they hold.
        tensor_bytes: bytes of all tensors.
        received_bytes: bytes of them that have arrived.
        nonfinite_elements: elements of all tensors that are NaN or infinite; 0 until it is verified, or if no longer known.
        create_time_ms, ready_time_ms, verified_time_ms, durable_time_ms: Unix time in milliseconds; 0 if not yet, or no longer known.
        error: why it failed, or why it could not be made durable, or that it was taken out of history; empty if all is well.
        error_details: one line for each tensor, box or rank concerned.
    """

    model: str
    number: int
    state: VersionState
    step: int = 0
    run: str = ""
    ranks: int = 0
    sealed_ranks: int = 0
    tensor_bytes: int = 0
    received_bytes: int = 0
    nonfinite_elements: int = 0
    create_time_ms: int = 0
    ready_time_ms: int = 0
    verified_time_ms: int = 0
    durable_time_ms: int = 0
    error: str = ""
    error_details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The version as JSON values."""
        return {
            "model": self.model,
            "number": self.number,
            "state": self.state.value,
            "step": self.step,
            "run": self.run,
            "ranks": self.ranks,
            "sealed_ranks": self.sealed_ranks,
            "tensor_bytes": self.tensor_bytes,
            "received_bytes": self.received_bytes,
            "nonfinite_elements": self.nonfinite_elements,
            "create_time_ms": self.create_time_ms,
            "ready_time_ms": self.ready_time_ms,
            "verified_time_ms": self.verified_time_ms,
            "durable_time_ms": self.durable_time_ms,
            "error": self.error,
            "error_details": list(self.error_details),
        }

    def __str__(self) -> str:
        return f"{self.model}@{self.number} ({self.state.value}, step {self.step})"


@dataclass(frozen=True, slots=True)
class Model:
    """A registered model.

    Attributes:
        name: ``namespace/name``.
        model_type: of the Hugging Face config.
        dtype: of the weights, in safetensors' name.
        tensor_count: number of tensors.
        tensor_bytes: bytes of all of them.
        files: names of the files that belong to it besides the weights.
        refs: version number by ref.
    """

    name: str
    model_type: str
    dtype: str
    tensor_count: int
    tensor_bytes: int
    files: tuple[str, ...] = ()
    refs: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The model as JSON values."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "tensor_count": self.tensor_count,
            "tensor_bytes": self.tensor_bytes,
            "files": list(self.files),
            "refs": dict(self.refs),
        }


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions of a model are kept: all that one of the rules speaks for, and always those that a ref names.

    Attributes:
        keep_last: that many of the newest; 0 speaks for none.
        keep_every: of each so many consecutive numbers the first version that is there, so of 100 usually those whose numbers
            are multiples of 100; 0 speaks for none.
        keep_younger_s: those opened less than so many seconds ago; 0 speaks for none.

    Raises:
        InvalidArgument: one of them is not an integer from 0 to 2**53.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_younger_s: int = 0

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if type(value) is not int or not 0 <= value <= _MOST:
                raise InvalidArgument(f"{name} is {value!r}, not an integer from 0 to {_MOST}")

    @property
    def keeps_everything(self) -> bool:
        """Whether there is no rule at all, and so nothing is deleted."""
        return not any(self.to_json().values())

    def to_json(self) -> dict[str, int]:
        """The rules as JSON values."""
        return {
            "keep_last": self.keep_last,
            "keep_every": self.keep_every,
            "keep_younger_s": self.keep_younger_s,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """What comparing a version's files with its manifest gave.

    Attributes:
        number: the version.
        tensors_checked: tensors whose digests were compared.
        bytes_checked: bytes read.
        problems: one line for each file or tensor that differs; empty if all is well.
    """

    number: int
    tensors_checked: int
    bytes_checked: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WarmMemory:
    """Memory that a service has for images of a model's versions.

    Attributes:
        model: ``namespace/name``.
        images: there is memory for so many, those of its versions included.
        wanted: a model that is pushed again and again needs so many.
        image_bytes: of one image.
    """

    model: str
    images: int
    wanted: int
    image_bytes: int
