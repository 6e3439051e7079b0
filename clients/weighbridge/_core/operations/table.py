"""Table of operations: every call of the contract.

To add a call, add an entry here, its messages in ``protos/``, and a body in ``weighbridge_service.api.bodies``.
"""

from __future__ import annotations

from typing import Any

from weighbridge._core.operations.operation import LONG_SECONDS, Of, Operation, OperationEntry, Parameter
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.reports.collection import Collection
from weighbridge._core.reports.usage import Usage
from weighbridge._core.resources import (
    Gate,
    Model,
    ModelRefs,
    Protection,
    RefMove,
    RefRequest,
    Retention,
    Verification,
    Version,
    WarmMemory,
)

_UNREGISTERED = ("NotFound", "the model is not registered")
_NO_VERSION = ("NotFound", "the model or version does not exist")

_MODEL = Parameter("model", str, "``namespace/name``")
_NUMBER = Parameter("number", int, "number of the version; None if ``model`` names it, as ``acme/smol@17`` does")
_VERSION = Parameter("version", str, "a number or a ref")
_REF = Parameter("ref", str, "the ref")
_NAMED = (
    Parameter("request_id", str, "ID of the call, if it may wait for approvals", "", offered=False),
    Parameter("note", str, "note that is stored with the request", "", offered=False),
)
_REQUEST = Parameter("request_id", str, "the `request_id` of the request")
_APPROVALS = Parameter("approvals", int, "number of other identities that must approve each change, 16 at most", 0)
_BY = Parameter("by", str, "name of the approver, as free text; by default the address of the caller", "")
_NOTE = Parameter("note", str, "note that is stored with the approval", "")
_REASONS = Parameter(
    "reasons",
    tuple[str, ...],
    "the reasons to approve; if empty, all of them, including those found since the caller last looked",
    (),
)

OPEN_VERSION = OperationEntry("CheckpointService.OpenVersion", Verb.PUSH, Of.MODEL)
DECLARE_LAYOUT = OperationEntry("CheckpointService.DeclareLayout", Verb.PUSH, Of.NUMBER)
PUSH = OperationEntry("CheckpointService.Push", Verb.PUSH, Of.HEADER)
GET_PUSH_STATE = OperationEntry("CheckpointService.GetPushState", Verb.PUSH, Of.NUMBER)
SEAL_RANK = OperationEntry("CheckpointService.SealRank", Verb.PUSH, Of.NUMBER)
ABORT_VERSION = OperationEntry("CheckpointService.AbortVersion", Verb.PUSH, Of.NUMBER)
RESTORE = OperationEntry("CheckpointService.Restore", Verb.PULL, Of.VERSION)
DESCRIBE_SHARDS = OperationEntry("CheckpointService.DescribeShards", Verb.LOOK, Of.MODEL)

REGISTER_MODEL = OperationEntry("ModelService.RegisterModel", Verb.PUSH, Of.MODEL)
GET_MODEL = Operation(
    "ModelService.GetModel",
    Verb.LOOK,
    Of.MODEL,
    Model,
    "model",
    (_MODEL,),
    http="GET /v1/models/{model}",
    tag="models",
    text="One model.",
)
LIST_MODELS = Operation(
    "ModelService.ListModels",
    Verb.LOOK,
    Of.NOTHING,
    Model,
    "models",
    order="name",
    pages=True,
    http="GET /v1/models",
    tag="models",
    call="models",
    text="Models by name.",
    example=(
        ">>> [model.name for model in client.models()]",
        "['acme/smol']",
    ),
)
GET_MODEL_FILES = OperationEntry("ModelService.GetModelFiles", Verb.LOOK, Of.VERSION)
GET_VERSION = OperationEntry(
    "ModelService.GetVersion", Verb.LOOK, Of.VERSION, http="GET /v1/models/{model}/versions/{version}"
)
LIST_VERSIONS = Operation(
    "ModelService.ListVersions",
    Verb.LOOK,
    Of.MODEL,
    Version,
    "versions",
    (
        _MODEL,
        Parameter(
            "include_invisible",
            bool,
            "whether to include versions that are still being received, and versions that failed recently",
            False,
        ),
        Parameter("where", tuple[str, ...], "conditions on metadata that a listed version must all meet", ()),
    ),
    order="number",
    pages=True,
    http="GET /v1/models/{model}/versions",
    text="A model's versions, newest first.",
)
WATCH_REFS = OperationEntry("ModelService.WatchRefs", Verb.LOOK, Of.REFS)
SET_REF = Operation(
    "ModelService.SetRef",
    Verb.TAG,
    Of.REF,
    RefMove,
    "",
    (_MODEL, _REF, _VERSION, *_NAMED),
    part="version",
    http="PUT /v1/models/{model}/refs/{ref}",
    tag="refs",
    call="set_ref",
    text=(
        "Set a tag to a version in the object store. If the change needs approvals, it must be "
        "requested: see `Client.request_ref`."
    ),
    raises=(
        ("PermissionDenied", "the tag is protected, and no scope of this client names it"),
        (
            "FailedPrecondition",
            "the change needs approvals, and it was not requested: see `Client.request_ref`",
        ),
    ),
    example=(
        '>>> version = client.set_ref("acme/smol", "prod", 1)',
        ">>> print(version)",
        "acme/smol@1 (durable, step 100)",
        '>>> refs = client.refs("acme/smol")',
        '>>> refs["prod"]',
        "1",
    ),
)
DELETE_REF = Operation(
    "ModelService.DeleteRef",
    Verb.TAG,
    Of.REF,
    RefRequest,
    "request",
    (_MODEL, _REF, *_NAMED),
    part=None,
    http="DELETE /v1/models/{model}/refs/{ref}",
    tag="refs",
    call="delete_ref",
    text="Delete a tag. If the deletion needs approvals, it must be requested: see `Client.request_ref_deletion`.",
    more="Raises NotFound and the errors of `set_ref`.",
    example=(
        '>>> version = client.set_ref("acme/smol@1", "prod")',
        '>>> client.delete_ref("acme/smol", "prod")',
        '>>> refs = client.refs("acme/smol")',
        ">>> sorted(refs)",
        "['latest', 'live']",
    ),
)
APPROVE_REF = Operation(
    "ModelService.ApproveRef",
    Verb.APPROVE,
    Of.REF,
    RefRequest,
    "request",
    (_MODEL, _REF, _REQUEST, _NOTE),
    pending="pending",
    http="POST /v1/models/{model}/refs/{ref}/requests/{request_id}/approve",
    tag="refs",
    call="approve_ref",
    text=(
        "Approve a change of a protected ref that another identity has requested. The last "
        "approval that it needs carries it out."
    ),
    more="Calling this again is harmless. It does not approve a later request for the same ref.",
    raises=(
        ("PermissionDenied", "this identity made the request, or has no scope that names the ref"),
        ("FailedPrecondition", "the request was withdrawn or superseded, or it has expired"),
        ("NotFound", "the request does not exist, or what it names no longer exists"),
    ),
)
WITHDRAW_REF = Operation(
    "ModelService.WithdrawRef",
    Verb.TAG,
    Of.REF,
    RefRequest,
    "request",
    (_MODEL, _REF, _REQUEST),
    http="DELETE /v1/models/{model}/refs/{ref}/requests/{request_id}",
    tag="refs",
    call="withdraw_ref",
    text="End a request without carrying it out.",
    more="Calling this again is harmless. Raises the errors of `approve_ref`.",
)
SET_PROTECTION = Operation(
    "ModelService.SetProtection",
    Verb.MANAGE,
    Of.REF,
    Protection,
    "protections",
    (_MODEL, _REF, _APPROVALS),
    order="ref",
    http="PUT /v1/models/{model}/refs/{ref}/protection",
    route="protect_ref",
    tag="refs",
    call="protect_ref",
    text="Protect a ref, whether it exists or not. Then only callers with a scope that names the ref can change it.",
    more="Returns all protected refs of the model.",
    raises=(("FailedPrecondition", "the service has no identities, or the ref needs more approvals now"),),
)
DELETE_PROTECTION = Operation(
    "ModelService.DeleteProtection",
    Verb.MANAGE,
    Of.REF,
    RefRequest,
    "request",
    (_MODEL, _REF, *_NAMED),
    http="DELETE /v1/models/{model}/refs/{ref}/protection",
    route="unprotect_ref",
    text=(
        "Remove the protection of a ref, or request its removal. This needs the same scope and "
        "approvals as moving the ref."
    ),
)
LIST_REFS = Operation(
    "ModelService.ListRefs",
    Verb.LOOK,
    Of.MODEL,
    ModelRefs,
    "",
    (_MODEL,),
    http="GET /v1/models/{model}/refs",
    tag="refs",
    text="All refs of a model, which of them are protected, and the requests to change these.",
)
VERIFY_VERSION = Operation(
    "ModelService.VerifyVersion",
    Verb.PULL,
    Of.VERSION,
    Verification,
    "",
    (
        _MODEL,
        _VERSION,
        Parameter("sha256", bool, "whether to compute the SHA-256 of each file as well", False, offered=False),
    ),
    http="POST /v1/models/{model}/versions/{version}/verify",
    call="verify",
    text="Compare a version's files in the object store with the digests in its manifest.",
    raises=(_NO_VERSION,),
    seconds=LONG_SECONDS,
    example=(
        '>>> verification = client.verify("acme/smol", "latest")',
        ">>> verification.tensors_checked, verification.problems",
        "(24, ())",
    ),
)
READ_MANIFEST = OperationEntry("ModelService.ReadManifest", Verb.LOOK, Of.NUMBER)
GET_SIGNATURES = OperationEntry(
    "ModelService.GetSignatures",
    Verb.LOOK,
    Of.VERSION,
    http="GET /v1/models/{model}/versions/{version}/signatures",
    route="list_signatures",
)
ADD_SIGNATURE = OperationEntry(
    "ModelService.AddSignature",
    Verb.SIGN,
    Of.NUMBER,
    http="POST /v1/models/{model}/versions/{version}/signatures",
)
GET_RETENTION = Operation(
    "ModelService.GetRetention",
    Verb.LOOK,
    Of.MODEL,
    Retention,
    "retention",
    (_MODEL,),
    http="GET /v1/models/{model}/retention",
    tag="retention",
    call="retention",
    text="The rules by which versions of a model are kept.",
    raises=(_UNREGISTERED,),
)
SET_RETENTION = Operation(
    "ModelService.SetRetention",
    Verb.MANAGE,
    Of.MODEL,
    Retention,
    "retention",
    (_MODEL, Parameter("retention", Retention, "the rules, which replace the previous ones")),
    http="PUT /v1/models/{model}/retention",
    tag="retention",
    call="set_retention",
    text="Set the rules by which versions of a model are kept. The next collection deletes the others.",
    more="They can be read for a grace time after that. ``Retention()`` keeps all versions.",
    raises=(_UNREGISTERED,),
    example=(
        '>>> retention = client.set_retention("acme/smol", Retention(keep_last=10, keep_every_steps=1000))',
        ">>> retention.text",
        "'the last 10, one of every 1000 steps, what refs name or engines serve'",
    ),
)
GET_GATE = Operation(
    "ModelService.GetGate",
    Verb.LOOK,
    Of.MODEL,
    Gate,
    "gate",
    (_MODEL,),
    http="GET /v1/models/{model}/gate",
    tag="gate",
    call="gate",
    text="The rules by which versions of a model are held.",
    raises=(_UNREGISTERED,),
)
SET_GATE = Operation(
    "ModelService.SetGate",
    Verb.MANAGE,
    Of.MODEL,
    Gate,
    "gate",
    (_MODEL, Parameter("gate", Gate, "the rules, which replace the previous ones")),
    http="PUT /v1/models/{model}/gate",
    tag="gate",
    call="set_gate",
    text="Set the rules by which versions of a model are held. They apply to versions that are opened from now on.",
    raises=(_UNREGISTERED,),
    example=(
        '>>> gate = client.set_gate("acme/smol", Gate(approval_required=True))',
        ">>> gate.text",
        "'every version, as a candidate and versions with NaN or infinite elements'",
    ),
)
APPROVE_VERSION = Operation(
    "ModelService.ApproveVersion",
    Verb.APPROVE,
    Of.NUMBER,
    Version,
    "version",
    (_MODEL, _NUMBER, _BY, _NOTE, _REASONS),
    http="POST /v1/models/{model}/versions/{version}/approve",
    tag="versions",
    text="Release a held version: ``live`` and ``latest`` may then name it, if it is newer than "
    "the version that they name. "
    "Approving a version that is not held changes nothing.",
)
DELETE_VERSION = Operation(
    "ModelService.DeleteVersion",
    Verb.MANAGE,
    Of.NUMBER,
    Version,
    "version",
    (
        _MODEL,
        _NUMBER,
        Parameter("force", bool, "whether to delete the version even if adapters are based on it", False),
    ),
    http="DELETE /v1/models/{model}/versions/{version}",
    tag="versions",
    call="delete_version",
    text="Remove a version that no ref names from the history. It can be read by its number for a grace time.",
    more=(
        "The version is removed regardless of the retention. With ``force``, adapters based on it "
        "report that their base was deleted."
    ),
    raises=(
        _NO_VERSION,
        (
            "FailedPrecondition",
            (
                "a ref names the version, as ``latest`` names the newest one; it is not durable "
                "yet; or adapters are based on it (names them)"
            ),
        ),
    ),
    seconds=LONG_SECONDS,
    example=(
        '>>> newer = trainer.push_state_dict("acme/smol", model, step=200).wait()',
        '>>> version = client.delete_version("acme/smol", 1)',
        ">>> print(version)",
        "acme/smol@1 (retired, step 100)",
    ),
)
DELETE_MODEL = OperationEntry(
    "ModelService.DeleteModel",
    Verb.MANAGE,
    Of.MODEL,
    http="DELETE /v1/models/{model}",
    seconds=LONG_SECONDS,
)
COLLECT_VERSIONS = Operation(
    "ModelService.CollectVersions",
    Verb.MANAGE,
    Of.MODEL,
    Collection,
    "collection",
    (_MODEL, Parameter("dry_run", bool, "whether to only report what would be deleted", False)),
    http="POST /v1/models/{model}/collect",
    call="collect",
    text="Delete now what need not be kept, instead of waiting until the service does so by itself.",
    raises=(_UNREGISTERED,),
    seconds=LONG_SECONDS,
    example=(
        '>>> newer = trainer.push_state_dict("acme/smol", model, step=200).wait()',
        '>>> retention = client.set_retention("acme/smol", Retention(keep_last=1))',
        '>>> collection = client.collect("acme/smol", dry_run=True)',
        ">>> [kept.number for kept in collection.kept]",
        "[2]",
    ),
)
WARM_MODEL = Operation(
    "ModelService.WarmModel",
    Verb.PUSH,
    Of.MODEL,
    WarmMemory,
    "memory",
    (_MODEL,),
    call="warm",
    text=(
        "Make the service allocate memory for a model's next versions now, so that the first push does not wait for it."
    ),
    more=(
        "The service uses unused memory within its budget, and does not reserve it: another model "
        "that needs the memory gets it."
    ),
    raises=(_UNREGISTERED,),
    seconds=LONG_SECONDS,
)
GET_USAGE = Operation(
    "ModelService.GetUsage",
    Verb.LOOK,
    Of.NOTHING,
    Usage,
    "",
    http="GET /v1/usage",
    tag="operations",
    call="usage",
    text="The limits that the policy sets for the caller, and how much of them is used.",
    more="Includes those of namespaces that the caller may look at.",
)

PLAN_PULL = OperationEntry("WeightService.PlanPull", Verb.PULL, Of.VERSION)
PULL = OperationEntry("WeightService.Pull", Verb.PULL, Of.VERSION)
REPORT_ENGINE = OperationEntry("EngineService.ReportEngine", Verb.PULL, Of.REPORT)
LIST_ENGINES = OperationEntry("EngineService.ListEngines", Verb.LOOK, Of.MODEL, http="GET /v1/engines")
GET_TICKET = OperationEntry("BulkService.GetTicket", Verb.LOOK, Of.NOTHING)
GET_LOCAL_LANE = OperationEntry("LocalLaneService.GetLocalLane", Verb.LOOK, Of.NOTHING)
EXCHANGE = OperationEntry("ReplicaService.Exchange", Verb.REPLICATE, Of.NOTHING)
READ_FILE = OperationEntry("ReplicaService.ReadFile", Verb.REPLICATE, Of.NUMBER)
TAKE_OVER = OperationEntry("ReplicaService.TakeOver", Verb.REPLICATE, Of.MODEL)

ENTRIES: tuple[OperationEntry, ...] = tuple(
    each for each in dict(globals()).values() if isinstance(each, OperationEntry)
)
OPERATIONS: tuple[Operation[Any], ...] = tuple(each for each in ENTRIES if isinstance(each, Operation))
"""The operations for which all code except the body is derived."""
