"""Bodies of requests and responses about models, versions, rules and exports."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from weighbridge._core import dtypes
from weighbridge._core.resources import Signature, VersionState
from weighbridge._signing.bundle import MAX_BYTES, signed_by
from weighbridge_service.exports.jobs import ExportState
from weighbridge_storage.documents.names import MODEL_PATTERN


class Out(BaseModel):
    """Base of what is answered."""

    model_config = ConfigDict(from_attributes=True, protected_namespaces=())


class In(BaseModel):
    """Base of what is sent."""

    # a member that does not exist is a slip that should be seen
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


VersionField = Annotated[
    str, Field(description="A number or a ref.", max_length=128, coerce_numbers_to_str=True, examples=["17"])
]


def _whole(value: object) -> object:
    """A number without a fraction as an integer, which JSON Schema takes it for."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# the limits stand before the validator, or they would not be in the JSON Schema
RuleField = Annotated[int, Field(strict=True, ge=0, le=2**53), BeforeValidator(_whole)]


class ModelOut(Out):
    """A registered model."""

    name: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    model_type: str = Field(description="Of the Hugging Face config.", examples=["llama"])
    dtype: str = Field(description="Of the weights, in safetensors' name.", examples=["BF16"])
    tensor_count: int = Field(description="Number of tensors.")
    tensor_bytes: int = Field(description="Bytes of all tensors together.")
    files: list[str] = Field(description="Files that belong to the model besides its weights.")
    refs: dict[str, int] = Field(description="Version number by ref.", examples=[{"latest": 17, "live": 18}])
    weight_map: bool = Field(
        description="Whether its tensors have Megatron-core's names, too; otherwise they have those of its files alone."
    )
    adapters: list[str] = Field(
        description="Adapters that are on versions of it, of those that you may look at.",
        examples=[["acme/alice"]],
    )
    base: str = Field(
        description="Of an adapter, the version that its newest version is on; empty of any other model.",
        examples=["acme/smol@17"],
    )


class ModelsOut(Out):
    """A page of models."""

    models: list[ModelOut] = Field(description="Models, by name.")


class BaseOut(Out):
    """The version that a version of an adapter is a change on."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="Of its version.", examples=[17])
    digest: str = Field(description="Of its manifest.")


class AdapterOut(Out):
    """An adapter that is on versions of a model."""

    model: str = Field(description="`namespace/name` of the adapter.", examples=["acme/alice"])
    versions: list[int] = Field(description="The versions that it is on.", examples=[[17, 18]])


class AdaptersOut(Out):
    """A page of adapters."""

    adapters: list[AdapterOut] = Field(description="Adapters, by name.")


class VersionOut(Out):
    """A version of a model."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="Unique and increasing within the model.", examples=[17])
    state: VersionState = Field(
        description="Engines can pull versions that are `ready`, `verified`, `durable` or `retired`."
    )
    step: int = Field(description="The trainer's step.")
    run: str = Field(description="The trainer's run.")
    ranks: int = Field(description="Trainer ranks that push it; 0 where that is no longer known.")
    sealed_ranks: int = Field(description="Ranks that have pushed all they hold.")
    tensor_bytes: int = Field(description="Bytes of all tensors together.")
    received_bytes: int = Field(description="Bytes of them that have arrived.")
    nonfinite_elements: int = Field(
        description="Elements that are NaN or infinite; until the version is verified, those that its ranks have counted."
    )
    create_time_ms: int = Field(description="Unix time in milliseconds.")
    ready_time_ms: int = Field(description="Unix time in milliseconds; 0 if not yet, or no longer known.")
    verified_time_ms: int = Field(description="Unix time in milliseconds; 0 if not yet, or no longer known.")
    durable_time_ms: int = Field(description="Unix time in milliseconds; 0 if not yet, or no longer known.")
    error: str = Field(
        description="Why it failed or is not durable yet, or that it was taken out of history; empty if all is well."
    )
    error_details: list[str] = Field(description="One line for each tensor, box or rank concerned.")
    held: list[str] = Field(
        description="Why `live` and `latest` pass it by: `nonfinite` (elements are NaN or infinite), `candidate` (it waits for "
        "approval), or what a later release adds. Empty if they do not.",
        examples=[["nonfinite"]],
    )
    approved_reasons: list[str] = Field(description="Reasons for which it was held, and that were approved.")
    approved_by: str = Field(description="Who approved it last, in their own words.")
    approved_time_ms: int = Field(description="When; Unix time in milliseconds, 0 if nobody did.")
    approved_note: str = Field(description="What they noted.")
    metadata: dict[str, str | int | float | bool] = Field(
        description="What was pushed with it.", examples=[{"reward": 0.71}]
    )
    waits_for: list[str] = Field(
        description="Of one that is being received, what it waits for, such as ranks that have not declared or sealed. "
        "A replica that no rank of it pushes to does not know."
    )
    traceparent: str = Field(description="Of the push, by W3C Trace Context; empty if it is not traced.")
    base: BaseOut | None = Field(
        description="Of an adapter, the version that it is on; null of any other. `error` says so if that was deleted."
    )


class DeletedModelOut(Out):
    """A model that was deleted."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    versions: int = Field(description="How many versions were part of its history.")


class VersionsOut(Out):
    """A page of versions."""

    versions: list[VersionOut] = Field(description="Versions, newest first.")


class SignatureOut(Out):
    """A signature of a version."""

    id: str = Field(description="SHA-256 of the signature.")
    method: str = Field(
        description="How it is signed: `key` or `certificate`; `unknown` if it is of a kind that this service does not know.",
        examples=["key"],
    )
    signer: str = Field(
        description="The key that it names, by SHA-256 of its PEM text; or the certificate, by SHA-256; empty if it is not known."
    )

    @classmethod
    def of(cls, signature: Signature) -> SignatureOut:
        """A signature for people and programs."""
        method, signer = signed_by(signature.content)
        return cls(id=signature.id, method=method, signer=signer)


class SignaturesOut(Out):
    """The signatures of a version."""

    number: int = Field(description="The version.")
    signatures: list[SignatureOut] = Field(description="In the order of their ids.")


class SignatureIn(In):
    """A signature."""

    content: str = Field(
        description="The bundle that `model_signing sign` has written, as text.", max_length=MAX_BYTES
    )


class VerificationOut(Out):
    """What comparing a version's files with its manifest gave."""

    number: int = Field(description="The version.")
    tensors_checked: int = Field(description="Tensors whose digests were compared.")
    bytes_checked: int = Field(description="Bytes read.")
    problems: list[str] = Field(
        description="One line for each file or tensor that differs; empty if all is well."
    )
    nonfinite_elements: int = Field(
        description="Elements that are NaN or infinite, by the manifest. That is no problem of the files."
    )


class GateOut(Out):
    """Which versions of a model are held, so that `live` and `latest` pass them by until they are approved."""

    approval_required: bool = Field(description="Whether each version is held as a candidate.")
    allow_nonfinite: bool = Field(
        description="Whether versions with elements that are NaN or infinite are not held for that."
    )


class GateIn(In):
    """What is said of a model's gate, instead of what was said before. It goes for versions that are opened from then on."""

    approval_required: StrictBool = False
    allow_nonfinite: StrictBool = False


class ApproveIn(In):
    """Who approves a version, and why."""

    by: str = Field(
        "", description="In your own words; by default the address of the caller.", max_length=256
    )
    note: str = Field("", description="Kept with the approval.", max_length=256)
    reasons: list[str] = Field(
        default_factory=list,
        description="For which of the reasons it is held for; none is all of them, those too that were found since you looked.",
        max_length=16,
    )


class RetentionOut(Out):
    """Which versions of a model are kept: those that a ref names and those that a rule speaks for. No rule keeps everything."""

    keep_last: int = Field(description="That many of the newest; 0 is no rule.")
    keep_every: int = Field(
        description="Of each so many consecutive numbers the first version that is there; 0 is no rule."
    )
    keep_younger_s: int = Field(description="Those opened less than so many seconds ago; 0 is no rule.")
    keep_every_steps: int = Field(
        0,
        description="Of each so many consecutive steps of a run the first version that is there; 0 is no rule.",
    )


class RetentionIn(In):
    """The rules, instead of those before; what is left out is no rule."""

    keep_last: RuleField = 0
    keep_every: RuleField = 0
    keep_younger_s: RuleField = 0
    keep_every_steps: RuleField = 0


class KeptOut(Out):
    """A version that is kept."""

    number: int = Field(description="Which version.")
    rules: list[str] = Field(description="Those that speak for it; `keep_everything` if there is no rule.")
    refs: list[str] = Field(description="Those that name it, or are asked to.")
    engines: list[str] = Field(
        description="Engines that serve it or are being taken to it, for people; of many the first, and how many more.",
        examples=[["vllm at http://node7:8000"]],
    )


class WaitingOut(Out):
    """A version that was taken out of history and whose objects are still needed."""

    number: int = Field(description="Which version.")
    until_ms: int = Field(description="They stay at least until then; Unix time in milliseconds.")
    readers: int = Field(description="Leases that keep them beyond the grace time.")


class DeletedOut(Out):
    """A version whose objects were deleted."""

    number: int = Field(description="Which version.")
    nbytes: int = Field(description="Bytes of its weights.")


class SweptOut(Out):
    """Objects of a number that stands for no version."""

    number: int = Field(description="Which version.")
    objects: int = Field(description="How many were deleted.")


class CollectIn(In):
    """How to collect."""

    dry_run: StrictBool = Field(
        description="Only say what would be done. To be said: the rest is deleted for good."
    )


class CollectionOut(Out):
    """What a collection did, or would have done."""

    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    dry_run: bool = Field(description="Whether nothing was changed.")
    kept: list[KeptOut] = Field(description="Versions that stay part of history, and why.")
    retired: list[int] = Field(description="Versions taken out of history now.")
    waiting: list[WaitingOut] = Field(
        description="Versions taken out of history, now or before, and still needed."
    )
    deleted: list[DeletedOut] = Field(description="Versions whose objects were deleted.")
    given_up: list[int] = Field(description="Versions being received of which nothing more was heard.")
    swept: list[SweptOut] = Field(description="What was left of versions that were given up or deleted.")
    uploads_discarded: int = Field(
        description="Objects never finished whose parts were removed; a dry run does not look for them."
    )
    leases_removed: int = Field(description="Leases that readers have left behind.")
    problems: list[str] = Field(
        description="One line for each deletion that failed; the next collection tries again."
    )


class ExportIn(In):
    """Which version to write as a Hugging Face folder, and how."""

    model: str = Field(
        description="`namespace/name`.", examples=["acme/smol"], json_schema_extra={"pattern": MODEL_PATTERN}
    )
    version: VersionField = "latest"
    folder: str | None = Field(
        None,
        description="Where, relative to the service's folder for exports; by default a new folder named after the "
        "model and the version.",
        examples=["smol-bf16"],
    )
    dtype: str | None = Field(
        None,
        description="Cast floating-point tensors; by default they stay as they are.",
        examples=["bf16"],
        json_schema_extra={"pattern": rf"^(torch\.)?({'|'.join(dtypes.NAMES)})$"},
    )
    max_shard_bytes: int | None = Field(
        None, description="Largest safetensors file, in bytes; by default 5 GB.", ge=1, le=2**53
    )


class ExportOut(Out):
    """An export as it stands."""

    id: str = Field(description="Names the job.")
    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="The version that is written.", examples=[17])
    folder: str = Field(
        description="Where the service writes it. It is there once the job is done, and not before."
    )
    state: ExportState = Field(description="The last three are final.")
    bytes_done: int = Field(description="Bytes of weights written so far.")
    bytes_total: int = Field(description="Bytes of weights to write; 0 until it runs.")
    error: str = Field(description="Why it failed; empty otherwise.")
    create_time_ms: int = Field(description="Unix time in milliseconds.")
    end_time_ms: int = Field(description="Unix time in milliseconds; 0 if it has not ended.")


class ExportsOut(Out):
    """The exports that are remembered."""

    exports: list[ExportOut] = Field(description="Exports, newest first.")
