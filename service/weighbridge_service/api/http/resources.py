"""Bodies of requests and responses about models, versions, rules and exports."""

from __future__ import annotations

from pydantic import Field, StrictBool

from weighbridge._core import dtypes
from weighbridge._core.reports.collection import Collection
from weighbridge._core.resources import DeletedModel, Signature, Verification, Version
from weighbridge._signing.bundle import MAX_BYTES, signed_by
from weighbridge_service.api.http.derived.schemas import In, Out, answer_of, list_of
from weighbridge_service.api.http.parameters import VersionField
from weighbridge_service.exports.jobs import ExportState
from weighbridge_storage.documents.names import MODEL_PATTERN


class AdapterOut(Out):
    """An adapter whose base is a version of a model."""

    model: str = Field(description="`namespace/name` of the adapter.", examples=["acme/alice"])
    versions: list[int] = Field(description="The versions that it is on.", examples=[[17, 18]])


class AdaptersOut(Out):
    """A page of adapters."""

    adapters: list[AdapterOut] = Field(description="Adapters, by name.")


VERSION = answer_of(Version)
VERSIONS = list_of(Version, "versions", "newest first")
DELETED_MODEL, COLLECTION = answer_of(DeletedModel), answer_of(Collection)
VERIFICATION = answer_of(Verification, "sha256")


class SignatureOut(Out):
    """A signature of a version."""

    id: str = Field(description="SHA-256 of the signature.")
    method: str = Field(
        description=(
            "How it is signed: `key` or `certificate`; `unknown` if it is of a kind that this service does not know."
        ),
        examples=["key"],
    )
    signer: str = Field(
        description=(
            "The key that it names, by SHA-256 of its PEM text; or the certificate, by SHA-256; "
            "empty if it is not known."
        )
    )

    @classmethod
    def of(cls, signature: Signature) -> SignatureOut:
        """The response body for a signature."""
        method, signer = signed_by(signature.content)
        return cls(id=signature.id, method=method, signer=signer)


class SignaturesOut(Out):
    """The signatures of a version."""

    number: int = Field(description="The version.")
    signatures: list[SignatureOut] = Field(description="In the order of their ids.")


class SignatureIn(In):
    """A signature."""

    content: str = Field(description="The bundle that `model_signing sign` has written, as text.", max_length=MAX_BYTES)


class CollectIn(In):
    """Options of a collection."""

    dry_run: StrictBool = Field(
        description="Only report what would be done. Required, because otherwise versions are deleted permanently."
    )


class ExportIn(In):
    """An export to start: the version to write as a Hugging Face folder, and options."""

    model: str = Field(
        description="`namespace/name`.", examples=["acme/smol"], json_schema_extra={"pattern": MODEL_PATTERN}
    )
    version: VersionField = "latest"
    folder: str | None = Field(
        None,
        description="The folder, relative to the service's folder for exports; by default a new folder named after the "
        "model and the version.",
        examples=["smol-bf16"],
    )
    dtype: str | None = Field(
        None,
        description="Cast floating-point tensors to this dtype; by default they keep their own.",
        examples=["bf16"],
        json_schema_extra={"pattern": rf"^(torch\.)?({'|'.join(dtypes.NAMES)})$"},
    )
    max_shard_bytes: int | None = Field(
        None, description="Maximum size of a safetensors file, in bytes; by default 5 GB.", ge=1, le=2**53, strict=True
    )


class ExportOut(Out):
    """An export and its current state."""

    id: str = Field(description="Identifies the export.")
    model: str = Field(description="`namespace/name`.", examples=["acme/smol"])
    number: int = Field(description="The version that is written.", examples=[17])
    folder: str = Field(description="Where the service writes it. The folder exists only once the export is done.")
    state: ExportState = Field(description="State of the export; the last three are final.")
    bytes_done: int = Field(description="Bytes of weights written so far.")
    bytes_total: int = Field(description="Bytes of weights to write; 0 until it runs.")
    error: str = Field(description="Why the export failed; empty otherwise.")
    create_time_ms: int = Field(description="Unix time in milliseconds.")
    end_time_ms: int = Field(description="Unix time in milliseconds; 0 if it has not ended.")


class ExportsOut(Out):
    """All exports that the service remembers."""

    exports: list[ExportOut] = Field(description="Exports, newest first.")
