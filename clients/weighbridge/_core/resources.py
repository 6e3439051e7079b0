"""Resources as the service reports them: models, versions, retention rules, verifications."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weighbridge._core.json_values import JsonValue, json_value
from weighbridge._core.metadata import BaseVersion, Metadata
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import FailedPrecondition, InvalidArgument

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
        nonfinite_elements: elements of all tensors that are NaN or infinite; 0 if no longer known. Until it is verified, those that its
            ranks have counted.
        create_time_ms, ready_time_ms, verified_time_ms, durable_time_ms: Unix time in milliseconds; 0 if not yet, or no longer known.
        error: why it failed, or why it could not be made durable, or that it was taken out of history; empty if all is well.
        error_details: one line for each tensor, box or rank concerned.
        held: why ``live`` and ``latest`` pass it by: `HELD_CANDIDATE`, `HELD_NONFINITE`, or what a later release adds; empty if they do not.
        approved_reasons: the reasons that were approved; empty if none was.
        approved_by: who approved it last, as they said themselves.
        approved_time_ms: when, as Unix time in milliseconds; 0 if nobody did.
        approved_note: what they noted.
        metadata: what was pushed with it.
        waits_for: of one that is being received, what it waits for, such as the ranks that have not declared or sealed;
            empty at a replica of the service that no rank of it pushes to.
        traceparent: of the push, by W3C Trace Context; empty if it is not traced.
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
    held: tuple[str, ...] = ()
    approved_reasons: tuple[str, ...] = ()
    approved_by: str = ""
    approved_time_ms: int = 0
    approved_note: str = ""
    metadata: Metadata = field(default_factory=dict, hash=False)
    waits_for: tuple[str, ...] = ()
    traceparent: str = ""

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
        """Of an adapter, the version that it is on; None of any other."""
        return BaseVersion.of(self.metadata)

    def to_json(self) -> dict[str, Any]:
        """Its fields and its base as JSON values, by name."""
        return {**JsonValue.to_json(self), "base": json_value(self.base)}

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
    """A model that was deleted.

    Attributes:
        model: ``namespace/name``.
        versions: how many were part of its history.
    """

    model: str
    versions: int


@dataclass(frozen=True, slots=True)
class Model(JsonValue):
    """A registered model.

    Attributes:
        name: ``namespace/name``.
        model_type: of the Hugging Face config.
        dtype: of the weights, in safetensors' name.
        tensor_count: number of tensors.
        tensor_bytes: bytes of all of them.
        files: names of the files that belong to it besides the weights.
        refs: version number by ref.
        weight_map: whether its tensors have Megatron-core's names, too; otherwise they have those of its files alone.
        adapters: adapters that are on versions of it.
        base: of an adapter, the version that its newest version is on, such as ``acme/smol@17``; empty of other models.
    """

    name: str
    model_type: str
    dtype: str
    tensor_count: int
    tensor_bytes: int
    files: tuple[str, ...] = ()
    refs: Mapping[str, int] = field(default_factory=dict)
    weight_map: bool = True
    adapters: tuple[str, ...] = ()
    base: str = ""

    @property
    def is_adapter(self) -> bool:
        """Whether its versions are changes on versions of another model, as peft keeps them."""
        return "adapter_config.json" in self.files and "config.json" not in self.files

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
    """Which versions of a model are kept: all that one of the rules speaks for, and always those that a ref names.

    Attributes:
        keep_last: that many of the newest; 0 speaks for none.
        keep_every: of each so many consecutive numbers the first version that is there, so of 100 usually those whose numbers
            are multiples of 100; 0 speaks for none.
        keep_younger_s: those opened less than so many seconds ago; 0 speaks for none.
        keep_every_steps: of each so many consecutive steps of a run the first version that is there; 0 disables the rule.

    Raises:
        InvalidArgument: one of them is not an integer from 0 to 2**53.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_younger_s: int = 0
    keep_every_steps: int = 0

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
    """What versions of a model have to pass before ``live`` and ``latest`` may name them. It goes for versions that are opened from then on.

    Attributes:
        approval_required: whether each is held as a candidate until it is approved.
        allow_nonfinite: whether versions with elements that are NaN or infinite are not held for that.
    """

    approval_required: bool = False
    allow_nonfinite: bool = False

    @property
    def text(self) -> str:
        """What is held, for people."""
        every = ["every version, as a candidate"] if self.approval_required else []
        broken = [] if self.allow_nonfinite else ["versions with NaN or infinite elements"]
        return " and ".join([*every, *broken]) or "what is pushed as a candidate"


@dataclass(frozen=True, slots=True)
class Protection(JsonValue):
    """What it takes to change a ref of a model: a scope that names the ref, and the approval of others.

    Attributes:
        ref: which one.
        approvals: of how many identities besides the one that asks; 0 if it takes none.
    """

    ref: str
    approvals: int = 0

    @property
    def text(self) -> str:
        """What it takes, for people."""
        approvals = f" and {counted(self.approvals, 'approval')}" if self.approvals else ""
        return f"{self.ref}, whose changes take a scope that names it{approvals}"


@dataclass(frozen=True, slots=True)
class RefApproval(JsonValue):
    """The approval of a request by one identity.

    Attributes:
        by: which one.
        time_ms: when, as Unix time in milliseconds.
        note: what they noted; may be empty.
    """

    by: str
    time_ms: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class RefRequest(JsonValue):
    """A change of a ref that was asked for, and what has become of it.

    Attributes:
        model: ``namespace/name``.
        ref: the ref.
        action: `REQUEST_MOVE`, `REQUEST_DELETE`, `REQUEST_PROTECT`, `REQUEST_UNPROTECT`, or what a later release adds.
        state: `REQUEST_PENDING`, `REQUEST_DONE`, or why it will not be carried out.
        version: the number that the ref shall name; 0 if none.
        request_id: which request; who approves it names it.
        by: the identity that asks.
        note: what they noted; may be empty.
        ask_time_ms, expire_time_ms, close_time_ms: Unix time in milliseconds; 0 if there is none.
        closed_by: whose call ended it; empty if that was time, or it has not ended.
        previous: the number that the ref named before it was carried out; 0 if none.
        approvals: those given so far.
        missing: how many more it takes.
    """

    model: str
    ref: str
    action: str
    state: str
    version: int = 0
    request_id: str = ""
    by: str = ""
    note: str = ""
    ask_time_ms: int = 0
    expire_time_ms: int = 0
    close_time_ms: int = 0
    closed_by: str = ""
    previous: int = 0
    approvals: tuple[RefApproval, ...] = ()
    missing: int = 0

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
class Verification(JsonValue):
    """What comparing a version's files with its manifest gave.

    Attributes:
        number: the version.
        tensors_checked: tensors whose digests were compared.
        bytes_checked: bytes read.
        problems: one line for each file or tensor that differs; empty if all is well.
        nonfinite_elements: elements of all tensors that are NaN or infinite, by the manifest. That is no problem of the files.
        sha256: SHA-256 of each file by name, as 64 hex digits, if it was asked for.
    """

    number: int
    tensors_checked: int
    bytes_checked: int
    problems: tuple[str, ...]
    nonfinite_elements: int = 0
    sha256: Mapping[str, str] = field(default_factory=dict, hash=False)


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
