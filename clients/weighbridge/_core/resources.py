"""Resources as the service reports them: models, versions, retention rules, verifications."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from weighbridge._core.file_names import is_adapter
from weighbridge._core.json_values import JsonValue
from weighbridge._core.metadata import BaseVersion, Metadata
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "HELD_CANDIDATE",
    "HELD_NONFINITE",
    "REF_LATEST",
    "REF_LIVE",
    "DeletedModel",
    "Gate",
    "Model",
    "Protection",
    "RefApproval",
    "RefRequest",
    "Retention",
    "Signature",
    "Verification",
    "Version",
    "VersionState",
    "WarmMemory",
]

_MOST = 2**53
REF_LIVE = "live"
"""The newest version that is complete and not held; it may not be verified or in the object store yet."""
REF_LATEST = "latest"
"""The newest version in the object store that is not held. From the first one on it names one for ever, and what it has named goes only
if the retention lets it."""
RECEIVING = "receiving:"
"""Watched in the place of a ref: the newest version that is being received and may become ``live``. No ref can have this name."""
HELD_CANDIDATE = "candidate"
"""Reason for which a version is held: who pushed it said so, or its model wants approval."""
HELD_NONFINITE = "nonfinite"
"""Reason for which a version is held: some of its elements are NaN or infinite."""


REQUEST_MOVE, REQUEST_DELETE = "move", "delete"
REQUEST_PROTECT, REQUEST_UNPROTECT = "protect", "unprotect"
"""What is asked for a protected ref: that it names a version, that it is taken away, that it is protected, or that it is no longer."""
REQUEST_PENDING, REQUEST_DONE = "pending", "done"
REQUEST_WITHDRAWN, REQUEST_SUPERSEDED, REQUEST_EXPIRED = "withdrawn", "superseded", "expired"
"""What becomes of a request: it waits for approval, was carried out, or will not be, for one of three reasons."""


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
    def receiving(self) -> bool:
        """Whether its bytes are still to come, or coming."""
        return self in (VersionState.OPEN, VersionState.RECEIVING)

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
class Version(JsonValue):
    """A version of a model."""

    ALSO_IN_JSON: ClassVar[tuple[str, ...]] = ("base",)

    model: str
    """`namespace/name`."""
    number: int
    """Unique and increasing within the model."""
    state: VersionState
    """Engines can pull versions that are `ready`, `verified`, `durable` or `retired`."""
    step: int = 0
    """The trainer's step."""
    run: str = ""
    """The trainer's run."""
    ranks: int = 0
    """Trainer ranks that push it; 0 where that is no longer known."""
    sealed_ranks: int = 0
    """Ranks that have pushed all they hold."""
    tensor_bytes: int = 0
    """Bytes of all tensors together."""
    received_bytes: int = 0
    """Bytes of them that have arrived."""
    nonfinite_elements: int = 0
    """Elements that are NaN or infinite; until the version is verified, those that its ranks have counted."""
    create_time_ms: int = 0
    """Unix time in milliseconds."""
    ready_time_ms: int = 0
    """Unix time in milliseconds; 0 if not yet, or no longer known."""
    verified_time_ms: int = 0
    """Unix time in milliseconds; 0 if not yet, or no longer known."""
    durable_time_ms: int = 0
    """Unix time in milliseconds; 0 if not yet, or no longer known."""
    error: str = ""
    """Why it failed or is not durable yet, or that it was taken out of history; empty if all is well."""
    error_details: tuple[str, ...] = ()
    """One line for each tensor, box or rank concerned."""
    held: tuple[str, ...] = ()
    """Why `live` and `latest` pass it by: `nonfinite` (elements are NaN or infinite), `candidate` (it waits for approval), or what a later release adds. Empty if they do not."""
    approved_reasons: tuple[str, ...] = ()
    """Reasons for which it was held, and that were approved."""
    approved_by: str = ""
    """Who approved it last, in their own words."""
    approved_time_ms: int = 0
    """When; Unix time in milliseconds, 0 if nobody did."""
    approved_note: str = ""
    """What they noted."""
    metadata: Metadata = field(default_factory=dict, hash=False)
    """What was pushed with it."""
    waits_for: tuple[str, ...] = ()
    """Of one that is being received, what it waits for, such as ranks that have not declared or sealed. A replica that no rank of it pushes to does not know."""
    traceparent: str = ""
    """Of the push, by W3C Trace Context; empty if it is not traced."""

    def __str__(self) -> str:
        held = f", held: {', '.join(self.held)}" if self.held else ""
        return f"{self.model}@{self.number} ({self.state.value}{held}, step {self.step})"

    @property
    def ready_seconds(self) -> float | None:
        """From its opening until it was complete; None if that is not known."""
        return _seconds(self.create_time_ms, self.ready_time_ms)

    @property
    def durable_seconds(self) -> float | None:
        """From its opening until it was in the object store; None if that is not known."""
        return _seconds(self.create_time_ms, self.durable_time_ms)

    @property
    def base(self) -> BaseVersion | None:
        """Of an adapter, the version that it is on; null of any other. `error` says so if that was deleted."""
        return BaseVersion.of(self.metadata)

    def check_whole(self) -> None:
        """Refuse a version of an adapter where one of a whole model is needed. Raises FailedPrecondition."""
        if self.base is not None:
            raise _no_whole_model(self.model, str(self.base))

    @property
    def approval_text(self) -> str:
        """What was approved of it, by whom, and their note, for people; empty if nothing was."""
        by = f" by {self.approved_by}" if self.approved_by else ""
        note = f": {self.approved_note}" if self.approved_note else ""
        return f"{', '.join(self.approved_reasons)}{by}{note}" if self.approved_reasons else ""


def _seconds(begun_ms: int, ended_ms: int) -> float | None:
    return (ended_ms - begun_ms) / 1000 if begun_ms and ended_ms >= begun_ms else None


def refs_text(refs: Mapping[str, int]) -> str:
    """Refs and what they name, for people; a dash if there are none."""
    return ", ".join(f"{ref}={number}" for ref, number in sorted(refs.items())) or "-"


def refs_of(refs: Mapping[str, int], number: int) -> tuple[str, ...]:
    """The refs that name a version, in order."""
    return tuple(sorted(ref for ref, named in refs.items() if named == number))


def why_failed(version: Version) -> str:
    """That a version was given up, and why, as a sentence."""
    named = f"{version.model}@{version.number}"
    return (
        version.error
        if version.error.startswith(named)
        else f"{named} (step {version.step}) failed: {version.error}"
    )


def why_held(version: Version) -> str:
    """What a version that is held is held for, and what can be done about it, as a sentence."""
    count = version.nonfinite_elements
    elements = f"{count} of its elements are" if count != 1 else "one of its elements is"
    reasons = {
        HELD_NONFINITE: f"{elements if count else 'elements of it are'} NaN or infinite",
        HELD_CANDIDATE: "it is a candidate",
    }
    named = f"{version.model}@{version.number}"
    switch = "; --allow-nonfinite (allow_nonfinite=True) pushes such weights without holding them"
    return (
        f"{named} is held: {' and '.join(reasons.get(each, each) for each in version.held)}. `{REF_LIVE}` and `{REF_LATEST}` "
        f"pass it by; it can be pulled by its number. To release it: weighbridge approve {named}"
        f"{switch if HELD_NONFINITE in version.held else ''}"
    )


@dataclass(frozen=True, slots=True)
class DeletedModel(JsonValue):
    """A model that was deleted."""

    model: str
    """`namespace/name`."""
    versions: int
    """How many versions were part of its history."""


@dataclass(frozen=True, slots=True)
class Model(JsonValue):
    """A registered model."""

    name: str
    """`namespace/name`."""
    model_type: str
    """Of the Hugging Face config."""
    dtype: str
    """Of the weights, in safetensors' name."""
    tensor_count: int
    """Number of tensors."""
    tensor_bytes: int
    """Bytes of all tensors together."""
    files: tuple[str, ...] = ()
    """Files that belong to the model besides its weights."""
    refs: Mapping[str, int] = field(default_factory=dict)
    """Version number by ref."""
    weight_map: bool = True
    """Whether its tensors have Megatron-core's names, too; otherwise they have those of its files alone."""
    adapters: tuple[str, ...] = ()
    """Adapters that are on versions of it, of those that you may look at."""
    base: str = ""
    """Of an adapter, the version that its newest version is on; empty of any other model."""

    @property
    def is_adapter(self) -> bool:
        """Whether its versions are changes on versions of another model, as peft keeps them."""
        return is_adapter(self.files)

    def check_whole(self) -> None:
        """Refuse an adapter where a whole model is needed. Raises FailedPrecondition."""
        if self.is_adapter:
            raise _no_whole_model(self.name, self.base)


def _no_whole_model(name: str, base: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} is an adapter{f' on {base}' if base else ''}",
        fix="load it beside its base, with peft, vLLM or SGLang, and import it with --base (docs/adapters.md); or push the merged model under another name (docs/recipes/lora.md) and take that",
    )


@dataclass(frozen=True, slots=True)
class Retention(JsonValue):
    """Which versions of a model are kept: those that a ref names and those that a rule speaks for. No rule keeps everything.

    Raises:
        InvalidArgument: one of them is not an integer from 0 to 2**53.
    """

    keep_last: int = 0
    """That many of the newest; 0 is no rule."""
    keep_every: int = 0
    """Of each so many consecutive numbers the first version that is there; 0 is no rule."""
    keep_younger_s: int = 0
    """Those opened less than so many seconds ago; 0 is no rule."""
    keep_every_steps: int = 0
    """Of each so many consecutive steps of a run the first version that is there; 0 is no rule."""

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if type(value) is not int or not 0 <= value <= _MOST:
                raise InvalidArgument(f"{name} is {value!r}, not an integer from 0 to {_MOST}")

    @property
    def keeps_everything(self) -> bool:
        """Whether there is no rule at all, and so nothing is deleted."""
        return not any(self.to_json().values())

    @property
    def text(self) -> str:
        """What is kept, for people."""
        rules = (
            (self.keep_last, f"the last {self.keep_last}"),
            (self.keep_every_steps, f"one of every {self.keep_every_steps} steps"),
            (self.keep_every, f"one of every {self.keep_every} numbers"),
            (self.keep_younger_s, f"those younger than {readable_duration(self.keep_younger_s)}"),
        )
        said = [text for value, text in rules if value]
        return ", ".join([*said, "what refs name or engines serve"]) if said else "everything"


@dataclass(frozen=True, slots=True)
class Gate(JsonValue):
    """Which versions of a model are held, so that ``live`` and ``latest`` pass them by until they are approved.

    It goes for versions that are opened from then on.
    """

    approval_required: bool = False
    """Whether each version is held as a candidate."""
    allow_nonfinite: bool = False
    """Whether versions with elements that are NaN or infinite are not held for that."""

    @property
    def text(self) -> str:
        """What is held, for people."""
        every = ["every version, as a candidate"] if self.approval_required else []
        broken = [] if self.allow_nonfinite else ["versions with NaN or infinite elements"]
        return " and ".join([*every, *broken]) or "what is pushed as a candidate"


@dataclass(frozen=True, slots=True)
class Protection(JsonValue):
    """What it takes to change a protected ref: a scope that names it, and the approval of others."""

    ref: str
    """The ref, whether it exists or not."""
    approvals: int = 0
    """Of how many identities besides the one that asks."""

    @property
    def text(self) -> str:
        """What it takes, for people."""
        approvals = f" and {counted(self.approvals, 'approval')}" if self.approvals else ""
        return f"{self.ref}, whose changes take a scope that names it{approvals}"


@dataclass(frozen=True, slots=True)
class RefApproval(JsonValue):
    """The approval of a request by one identity."""

    by: str
    """Which one."""
    time_ms: int
    """Unix time in milliseconds."""
    note: str = ""
    """What they noted."""


@dataclass(frozen=True, slots=True)
class RefRequest(JsonValue):
    """A change of a ref that was asked for, and what has become of it."""

    model: str
    """`namespace/name`."""
    ref: str
    """The ref."""
    action: str
    """`move`, `delete`, `protect` or `unprotect`, or what a later release adds."""
    state: str
    """`pending`, `done`, `withdrawn`, `superseded` by a newer one for the ref, `expired`, or what a later release adds."""
    version: int = 0
    """The number that the ref shall name; 0 if none."""
    request_id: str = ""
    """Who approves it names it by this."""
    by: str = ""
    """The identity that asks."""
    note: str = ""
    """What it noted."""
    ask_time_ms: int = 0
    """Unix time in milliseconds."""
    expire_time_ms: int = 0
    """Unix time in milliseconds."""
    close_time_ms: int = 0
    """When it ended; Unix time in milliseconds, 0 if it has not."""
    closed_by: str = ""
    """Whose call ended it; empty if that was time."""
    previous: int = 0
    """The number that the ref named before it was carried out; 0 if none."""
    approvals: tuple[RefApproval, ...] = ()
    """Those given so far."""
    missing: int = 0
    """How many more it takes."""

    @property
    def text(self) -> str:
        """What it asks for, for people."""
        if self.action == REQUEST_MOVE:
            return f"{self.ref} to name version {self.version}"
        return f"{self.action} of {self.ref}"

    @property
    def pending(self) -> bool:
        """Whether it waits for approval."""
        return self.state == REQUEST_PENDING

    @property
    def done(self) -> bool:
        """Whether it was carried out."""
        return self.state == REQUEST_DONE


@dataclass(frozen=True, slots=True)
class RefMove(JsonValue):
    """A ref that was moved, or for which that was asked."""

    version: Version
    """The version that the ref names, or is asked to name."""
    request: RefRequest
    """Whether that is done."""


@dataclass(frozen=True, slots=True)
class ModelRefs(JsonValue):
    """The refs of a model."""

    refs: Mapping[str, int]
    """Version number by ref. `live` and `latest` move by themselves; the others are tags."""
    protections: tuple[Protection, ...]
    """Protected refs."""
    requests: tuple[RefRequest, ...]
    """To change protected refs: those that are pending, and the last ones that have ended, in the order of asking."""


@dataclass(frozen=True, slots=True)
class Verification(JsonValue):
    """What comparing a version's files with its manifest gave."""

    number: int
    """The version."""
    tensors_checked: int
    """Tensors whose digests were compared."""
    bytes_checked: int
    """Bytes read."""
    problems: tuple[str, ...]
    """One line for each file or tensor that differs; empty if all is well."""
    nonfinite_elements: int = 0
    """Elements that are NaN or infinite, by the manifest. That is no problem of the files."""
    sha256: Mapping[str, str] = field(default_factory=dict, hash=False)
    """SHA-256 of each file by name, as 64 hex digits, if it was asked for."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a version, as it is stored: a bundle of OpenSSF model signing.

    Attributes:
        id: SHA-256 of the content, as 64 hex digits.
        content: the bundle's JSON text.
    """

    id: str
    content: bytes


@dataclass(frozen=True, slots=True)
class WarmMemory(JsonValue):
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
