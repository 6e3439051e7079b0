"""Calls about versions: queries, stored manifests and signatures, waits for a state, verification, approval."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from weighbridge._clients.calls.operation_calls import ask, ask_all
from weighbridge._clients.calls.steps import Pause, Steps, Work, call_method
from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.operations import table
from weighbridge._core.references import Reference
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge._core.resources import REF_LATEST, Signature, Version, VersionState
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.waits import REMIND_SECONDS, Reminder
from weighbridge._transport import wire
from weighbridge.errors import DataLoss, DeadlineExceeded, InvalidArgument
from weighbridge.v1 import model_service_pb2 as pb

log = logging.getLogger(__name__)

_AWAITED = (
    *(VersionState.OPEN, VersionState.RECEIVING),
    *(VersionState.READY, VersionState.VERIFIED, VersionState.DURABLE),
)
_PROGRESS_SECONDS = 0.5
"""Maximum wait of one call for a state, if the caller requests progress."""
_PAUSE_SECONDS = 0.1

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["ModelService"])


def get_version(model: str, version: str | int | None) -> Steps[Version]:
    """Return a version."""
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.GetVersionRequest(model=meant.model, version=meant.version)
    return wire.version_from_proto((yield from _call("GetVersion", request)).version)


def rank_progress(model: str, number: int) -> Steps[list[RankProgress]]:
    """Return the progress of each rank of a push; empty if the replica that responds does not know the push."""
    request = pb.GetVersionRequest(model=model, version=str(number), with_ranks=True)
    response = yield from _call("GetVersion", request)
    return [wire.read(RankProgress, each) for each in response.ranks]


def wait_for(
    model: str,
    version: str | int | None,
    state: VersionState,
    timeout: float | None,
    on_progress: Callable[[Version], None] | None,
) -> Steps[Version]:
    """Wait until a version has reached a state.

    The service responds to the calls only when that happens, or at their deadline.
    """
    if state not in _AWAITED:
        allowed = ", ".join(each.value for each in _AWAITED)
        raise InvalidArgument(
            f"a version cannot be waited for to be {getattr(state, 'value', state)}",
            fix=f"wait for {allowed}",
        )
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.GetVersionRequest(model=meant.model, version=meant.version, wait_for=wire.state_to_proto(state))
    longest = REMIND_SECONDS if on_progress is None else _PROGRESS_SECONDS
    reminder = Reminder()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    said: list[str] | None = None  # the reason that the last call returned; None before the first call
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and said is not None:
            raise DeadlineExceeded(
                f"{meant.model}@{meant.version} was not {state.value} within {timeout:g} s", details=said
            )
        said = []
        try:
            response = yield from _call("GetVersion", request, min(longest, max(left, 1.0)))
        except DeadlineExceeded as error:
            said = [error.message]
            waited = reminder.due()
            if on_progress is not None or waited is not None:
                found = yield from get_version(meant.model, meant.version)
                if on_progress is not None:
                    on_progress(found)
                if waited is not None and found.waits_for:
                    log.warning(
                        "%s: for %s, waits for %s",
                        found,
                        readable_duration(waited, rough=True),
                        "; ".join(found.waits_for),
                    )
            yield Pause(_PAUSE_SECONDS)  # the service may be too busy to let this call wait
            continue
        found = wire.version_from_proto(response.version)
        if on_progress is not None:
            on_progress(found)
        return found


def list_versions(
    model: str, *, include_invisible: bool, where: Sequence[str] = (), limit: int | None = None
) -> Steps[list[Version]]:
    """List the versions of a model, page by page, up to a limit."""
    if limit is not None and limit < 1:
        raise InvalidArgument(f"{limit} versions cannot be listed", fix="ask for at least one")
    return (
        yield from ask_all(
            table.LIST_VERSIONS, limit, model=model, include_invisible=include_invisible, where=tuple(where)
        )
    )


def approve(model: str, version: str | int | None, *, by: str, note: str) -> Steps[Version]:
    """Approve the reasons for which a version is held now.

    A repeated call does not approve reasons that were added later.
    """
    meant = Reference.of(model, version)
    found = yield from get_version(meant.model, meant.number)
    if not found.held:
        return found
    said = {"model": meant.model, "number": meant.number, "by": by, "note": note, "reasons": found.held}
    return (yield from ask(table.APPROVE_VERSION, **said))


def get_manifest(model: str, number: int) -> Steps[ManifestText]:
    """Return a version's manifest, which is read in parts.

    Raises:
        DataLoss: the manifest is malformed, or belongs to another version.
    """
    text = bytearray()
    while True:
        request = pb.ReadManifestRequest(model=model, number=number, offset=len(text))
        part = yield from _call("ReadManifest", request)
        text += part.data
        if len(text) >= part.total_bytes or not part.data:
            break
    manifest: ManifestText = yield Work(partial(ManifestText.read, bytes(text)))
    if (manifest.model, manifest.number) != (model, number):  # the service may be wrong, or malicious
        raise DataLoss(f"the service returned the manifest of {manifest.title} for {model}@{number}")
    return manifest


def tensor_digests(model: str, version: str | int | None) -> Steps[Mapping[str, str]]:
    """Return the digests of a version's tensors by name, from its manifest."""
    meant = Reference.of(model, version, REF_LATEST)
    found = yield from get_version(meant.model, meant.version)
    manifest = yield from get_manifest(meant.model, found.number)
    return manifest.tensors


def get_signatures(model: str, version: str | int | None) -> Steps[tuple[int, tuple[Signature, ...]]]:
    """Return the number of a version, and its signatures."""
    meant = Reference.of(model, version, REF_LATEST)
    request = pb.GetSignaturesRequest(model=meant.model, version=meant.version)
    found = yield from _call("GetSignatures", request)
    # files are named by the digest, so the client computes it and does not trust the service
    digests = (hashlib.sha256(each.content).hexdigest() for each in found.signatures)
    return found.number, tuple(
        Signature(digest, each.content) for digest, each in zip(digests, found.signatures, strict=True)
    )
