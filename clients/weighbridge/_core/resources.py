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
"""The newest version in the object store that is not held. Once this ref names a version, it always names one. The
retention rules determine when a version that it no longer names is deleted.
"""
RECEIVING = "receiving:"
"""Pseudo-ref for watches: the newest version that is being received and may become ``live``.

No ref can have this name.
"""
HELD_CANDIDATE = "candidate"
"""Reason why a version is held: its trainer pushed it as a candidate, or the gate of its model requires approval."""
HELD_NONFINITE = "nonfinite"
"""Reason why a version is held: some of its elements are NaN or infinite."""


REQUEST_MOVE, REQUEST_DELETE = "move", "delete"
REQUEST_PROTECT, REQUEST_UNPROTECT = "protect", "unprotect"
"""Actions of a request for a protected ref: move it to a version, delete it, protect it, or remove its protection."""
REQUEST_PENDING, REQUEST_DONE = "pending", "done"
REQUEST_WITHDRAWN, REQUEST_SUPERSEDED, REQUEST_EXPIRED = "withdrawn", "superseded", "expired"
"""States of a request: it waits for approval, it was carried out, or it will not be carried out, for one of three
reasons.
"""


class VersionState(enum.Enum):
    """State of a version. docs/design.md lists the guarantees of each state."""

    OPEN = "open"
    """The version has a number. Not all ranks have declared yet, or the service has no memory for the version yet."""
    RECEIVING = "receiving"
    """The service has planned the push, and bytes are arriving."""
    READY = "ready"
    """The version is complete: every byte is in the memory of a live replica, and no writer can change it."""
    VERIFIED = "verified"
    """The service has computed digests of these bytes, and compared a sample with the bytes that ranks sent."""
    DURABLE = "durable"
    """The version is verified, in the object store, and part of the history."""
    FAILED = "failed"
    """The push failed before the version became visible, or the version was lost before it became durable."""
    ABORTED = "aborted"
    """A caller aborted the version."""
    RETIRED = "retired"
    """The version is no longer part of the history. Callers can read it by its number until the grace time ends."""

    @property
    def visible(self) -> bool:
        """Whether engines can pull the version."""
        return self in (VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE, VersionState.RETIRED)

    @property
    def stored(self) -> bool:
        """Whether the version can be read from the object store."""
        return self in (VersionState.DURABLE, VersionState.RETIRED)

    @property
    def receiving(self) -> bool:
        """Whether bytes of the version are still expected."""
        return self in (VersionState.OPEN, VersionState.RECEIVING)

    @property
    def given_up(self) -> bool:
        """Whether the version will never be complete, or was lost."""
        return self in (VersionState.FAILED, VersionState.ABORTED)

    def reached(self, wanted: VersionState) -> bool:
        """Whether a version in this state has reached ``wanted``; always false if either state is failed or aborted."""
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
    """Step of the trainer."""
    run: str = ""
    """Run of the trainer."""
    ranks: int = 0
    """Number of trainer ranks that push the version; 0 if it is no longer known."""
    sealed_ranks: int = 0
    """Number of ranks that have pushed all their bytes."""
    tensor_bytes: int = 0
    """Bytes of all tensors together."""
    received_bytes: int = 0
    """Bytes of the tensors that have arrived."""
    nonfinite_elements: int = 0
    """Number of elements that are NaN or infinite.

    Until the version is verified, this is the number that its ranks have counted.
    """
    create_time_ms: int = 0
    """Unix time in milliseconds."""
    ready_time_ms: int = 0
    """Unix time in milliseconds; 0 if this has not happened yet, or the time is no longer known."""
    verified_time_ms: int = 0
    """Unix time in milliseconds; 0 if this has not happened yet, or the time is no longer known."""
    durable_time_ms: int = 0
    """Unix time in milliseconds; 0 if this has not happened yet, or the time is no longer known."""
    error: str = ""
    """Reason why the version failed, is not durable yet, or was retired; empty if it has no problem."""
    error_details: tuple[str, ...] = ()
    """One line for each tensor, box or rank concerned."""
    held: tuple[str, ...] = ()
    """Reasons why `live` and `latest` skip the version: `nonfinite` (elements are NaN or infinite), `candidate` (it
    waits for approval), or a reason that a later release adds. Empty if the version is not held.
    """
    approved_reasons: tuple[str, ...] = ()
    """Reasons that were approved, of those for which the version was held."""
    approved_by: str = ""
    """Name of the last approver, as given with the approval."""
    approved_time_ms: int = 0
    """Unix time of the last approval in milliseconds; 0 if there was none."""
    approved_note: str = ""
    """Note of the last approver."""
    metadata: Metadata = field(default_factory=dict, hash=False)
    """Metadata that was pushed with the version."""
    waits_for: tuple[str, ...] = ()
    """Reasons why a version that is being received is not complete yet, such as ranks that have not declared or sealed.
    Empty at a replica that does not receive pushes of the version's ranks.
    """
    traceparent: str = ""
    """Trace of the push (W3C Trace Context); empty if it is not traced."""

    def __str__(self) -> str:
        held = f", held: {', '.join(self.held)}" if self.held else ""
        return f"{self.model}@{self.number} ({self.state.value}{held}, step {self.step})"

    @property
    def ready_seconds(self) -> float | None:
        """Seconds from the opening of the version until it was complete; None if unknown."""
        return _seconds(self.create_time_ms, self.ready_time_ms)

    @property
    def durable_seconds(self) -> float | None:
        """Seconds from the opening of the version until it was in the object store; None if unknown."""
        return _seconds(self.create_time_ms, self.durable_time_ms)

    @property
    def base(self) -> BaseVersion | None:
        """The base of a version of an adapter; null for any other version.

        If the base was deleted, `error` reports it.
        """
        return BaseVersion.of(self.metadata)

    def check_whole(self) -> None:
        """Raise FailedPrecondition if this is a version of an adapter.

        Called where a version of a whole model is needed.
        """
        if self.base is not None:
            raise _no_whole_model(self.model, str(self.base))

    @property
    def approval_text(self) -> str:
        """The approved reasons, with the approver and the note, as text; empty if no reason was approved."""
        by = f" by {self.approved_by}" if self.approved_by else ""
        note = f": {self.approved_note}" if self.approved_note else ""
        return f"{', '.join(self.approved_reasons)}{by}{note}" if self.approved_reasons else ""


def _seconds(begun_ms: int, ended_ms: int) -> float | None:
    return (ended_ms - begun_ms) / 1000 if begun_ms and ended_ms >= begun_ms else None


def refs_text(refs: Mapping[str, int]) -> str:
    """Return refs and the versions that they name as text; a dash if the model has no refs."""
    return ", ".join(f"{ref}={number}" for ref, number in sorted(refs.items())) or "-"


def refs_of(refs: Mapping[str, int], number: int) -> tuple[str, ...]:
    """Return the refs that name a version, in order."""
    return tuple(sorted(ref for ref, named in refs.items() if named == number))


def why_failed(version: Version) -> str:
    """Return a sentence that reports that a version failed, and why."""
    named = f"{version.model}@{version.number}"
    return (
        version.error if version.error.startswith(named) else f"{named} (step {version.step}) failed: {version.error}"
    )


def why_held(version: Version) -> str:
    """Return a text that explains why a version is held, and how to release it."""
    count = version.nonfinite_elements
    elements = f"{count} of its elements are" if count != 1 else "one of its elements is"
    reasons = {
        HELD_NONFINITE: f"{elements if count else 'elements of it are'} NaN or infinite",
        HELD_CANDIDATE: "it is a candidate",
    }
    named = f"{version.model}@{version.number}"
    switch = "; --allow-nonfinite (allow_nonfinite=True) pushes such weights without holding them"
    return (
        f"{named} is held: {' and '.join(reasons.get(each, each) for each in version.held)}. `{REF_LIVE}` "
        f"and `{REF_LATEST}` skip it; it can be pulled by its number. To release it: weighbridge approve "
        f"{named}{switch if HELD_NONFINITE in version.held else ''}"
    )


@dataclass(frozen=True, slots=True)
class DeletedModel(JsonValue):
    """A model that was deleted."""

    model: str
    """`namespace/name`."""
    versions: int
    """Number of versions in the history of the model."""


@dataclass(frozen=True, slots=True)
class Model(JsonValue):
    """A registered model."""

    name: str
    """`namespace/name`."""
    model_type: str
    """`model_type` of the Hugging Face config."""
    dtype: str
    """Dtype of the weights, by its safetensors name."""
    tensor_count: int
    """Number of tensors."""
    tensor_bytes: int
    """Bytes of all tensors together."""
    files: tuple[str, ...] = ()
    """Files of the model other than its weights."""
    refs: Mapping[str, int] = field(default_factory=dict)
    """Version number by ref."""
    weight_map: bool = True
    """Whether the tensors also have Megatron-core's names. If not, they have only the names in the model's files."""
    adapters: tuple[str, ...] = ()
    """Adapters whose base is a version of this model, except those that the caller may not see."""
    base: str = ""
    """Base of the newest version, if the model is an adapter; empty for any other model."""

    @property
    def is_adapter(self) -> bool:
        """Whether the versions are peft adapters, each based on a version of another model."""
        return is_adapter(self.files)

    def check_whole(self) -> None:
        """Raise FailedPrecondition if this is an adapter. Called where a whole model is needed."""
        if self.is_adapter:
            raise _no_whole_model(self.name, self.base)


def _no_whole_model(name: str, base: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} is an adapter{f' on {base}' if base else ''}",
        fix=(
            "load it beside its base, with peft, vLLM or SGLang, and import it with --base "
            "(docs/adapters.md); or push the merged model under another name "
            "(docs/recipes/lora.md) and take that"
        ),
    )


@dataclass(frozen=True, slots=True)
class Retention(JsonValue):
    """Rules by which versions of a model are kept. A version is kept if a ref names it or a rule matches it. Without
    rules, all versions are kept.

    Raises:
        InvalidArgument: a rule is not an integer from 0 to 2**53.
    """

    keep_last: int = 0
    """Keep this many of the newest versions; 0 disables the rule."""
    keep_every: int = 0
    """Keep the first existing version of each block of this many consecutive numbers; 0 disables the rule."""
    keep_younger_s: int = 0
    """Keep versions that were opened less than this many seconds ago; 0 disables the rule."""
    keep_every_steps: int = 0
    """Keep the first existing version of each block of this many consecutive steps of a run; 0 disables the rule."""

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if type(value) is not int or not 0 <= value <= _MOST:
                raise InvalidArgument(f"{name} is {value!r}, not an integer from 0 to {_MOST}")

    @property
    def keeps_everything(self) -> bool:
        """Whether no rule is set, so that nothing is deleted."""
        return not any(self.to_json().values())

    @property
    def text(self) -> str:
        """Text that describes the versions that are kept."""
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
    """Rules by which versions of a model are held. ``live`` and ``latest`` skip a held version until it is approved.

    Changed rules apply to versions that are opened after the change.
    """

    approval_required: bool = False
    """Whether each version is held as a candidate."""
    allow_nonfinite: bool = False
    """Whether NaN or infinite elements are not a reason to hold a version."""

    @property
    def text(self) -> str:
        """Text that describes the versions that are held."""
        every = ["every version, as a candidate"] if self.approval_required else []
        broken = [] if self.allow_nonfinite else ["versions with NaN or infinite elements"]
        return " and ".join([*every, *broken]) or "what is pushed as a candidate"


@dataclass(frozen=True, slots=True)
class Protection(JsonValue):
    """Requirements for changing a protected ref: a scope that names the ref, and the approval of other identities."""

    ref: str
    """The ref, which need not exist."""
    approvals: int = 0
    """Number of other identities that must approve a change that an identity requests."""

    @property
    def text(self) -> str:
        """The ref and its requirements as text."""
        approvals = f" and {counted(self.approvals, 'approval')}" if self.approvals else ""
        return f"{self.ref}, whose changes need a scope that names it{approvals}"


@dataclass(frozen=True, slots=True)
class RefApproval(JsonValue):
    """The approval of a request by one identity."""

    by: str
    """The identity."""
    time_ms: int
    """Unix time in milliseconds."""
    note: str = ""
    """Note of the identity."""


@dataclass(frozen=True, slots=True)
class RefRequest(JsonValue):
    """A request to change a ref, and its state."""

    model: str
    """`namespace/name`."""
    ref: str
    """The ref."""
    action: str
    """`move`, `delete`, `protect` or `unprotect`, or an action that a later release adds."""
    state: str
    """`pending`, `done`, `withdrawn`, `superseded` by a newer request for the ref, `expired`, or a state that a later
    release adds.
    """
    version: int = 0
    """Number of the version that the ref will name; 0 if the request does not name one."""
    request_id: str = ""
    """ID of the request, which approvers use to name it."""
    by: str = ""
    """Identity that made the request."""
    note: str = ""
    """Note of that identity."""
    ask_time_ms: int = 0
    """Unix time in milliseconds."""
    expire_time_ms: int = 0
    """Unix time in milliseconds."""
    close_time_ms: int = 0
    """Unix time in milliseconds at which the request ended; 0 if it has not ended."""
    closed_by: str = ""
    """Identity whose call ended the request; empty if it expired."""
    previous: int = 0
    """Number of the version that the ref named before the change; 0 if it did not name one."""
    approvals: tuple[RefApproval, ...] = ()
    """Approvals so far."""
    missing: int = 0
    """Number of approvals that are still missing."""

    @property
    def text(self) -> str:
        """The requested change as text."""
        if self.action == REQUEST_MOVE:
            return f"{self.ref} to name version {self.version}"
        return f"{self.action} of {self.ref}"

    @property
    def pending(self) -> bool:
        """Whether the request waits for approval."""
        return self.state == REQUEST_PENDING

    @property
    def done(self) -> bool:
        """Whether the request was carried out."""
        return self.state == REQUEST_DONE


@dataclass(frozen=True, slots=True)
class RefMove(JsonValue):
    """A ref that was moved, or that a request will move."""

    version: Version
    """The version that the ref names, or will name."""
    request: RefRequest
    """The request. Its state is `done` if the ref was moved."""


@dataclass(frozen=True, slots=True)
class ModelRefs(JsonValue):
    """The refs of a model."""

    refs: Mapping[str, int]
    """Version number by ref. The service moves `live` and `latest`; the others are tags."""
    protections: tuple[Protection, ...]
    """Protected refs."""
    requests: tuple[RefRequest, ...]
    """Requests to change protected refs, oldest first: the pending ones, and the most recent ones that have ended."""


@dataclass(frozen=True, slots=True)
class Verification(JsonValue):
    """Result of comparing a version's files with its manifest."""

    number: int
    """Number of the version."""
    tensors_checked: int
    """Number of tensors whose digests were compared."""
    bytes_checked: int
    """Number of bytes read."""
    problems: tuple[str, ...]
    """One line for each file or tensor that differs; empty if none differs."""
    nonfinite_elements: int = 0
    """Number of elements that are NaN or infinite, according to the manifest. They do not count as problems."""
    sha256: Mapping[str, str] = field(default_factory=dict, hash=False)
    """SHA-256 of each file by name, as 64 hex digits, if the caller requested it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of a version, as it is stored: a bundle in the format of OpenSSF model signing.

    Attributes:
        id: SHA-256 of the content, as 64 hex digits.
        content: the bundle's JSON text.
    """

    id: str
    content: bytes


@dataclass(frozen=True, slots=True)
class WarmMemory(JsonValue):
    """Memory that the service has allocated for images of a model's versions.

    Attributes:
        model: ``namespace/name``.
        images: number of images that fit in the memory, including those of the model's versions.
        wanted: number of images that a repeatedly pushed model needs.
        image_bytes: bytes of one image.
    """

    model: str
    images: int
    wanted: int
    image_bytes: int
