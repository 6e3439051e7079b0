"""Check of a store, model by model, and repair of its findings.

A repair writes the head with a compare-and-swap against the surveyed head. So it can be interrupted at any point and
run again. It fails if a service has changed the model since the survey.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import Conflict, DataLoss, InvalidArgument, NotFound, WeighbridgeError
from weighbridge_service.fsck.diagnosis import Diagnosis, Finding, Mend, diagnose, repaired_head
from weighbridge_service.fsck.survey import Survey, SurveyedVersion, survey_model
from weighbridge_service.models.listed_tensors import write_tensor_list
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.registration import (
    files_identity,
    files_key,
    is_adapter_head,
    model_for_registration,
    registration_of,
    with_part,
)
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import (
    MANIFEST_FILE,
    ModelName,
    blocks_key,
    first_version_of,
    ledger_key,
    version_key,
)
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import stamp
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.repinning import repin
from weighbridge_storage.stores.objects import IfMatch, ObjectStore, PutMode
from weighbridge_storage.versions.digests import digest_bytes
from weighbridge_storage.versions.reading import read_manifest, side_files, tensors_of_files
from weighbridge_storage.versions.verifying import digest_object

log = logging.getLogger(__name__)

_DELETIONS = 8
"""Number of concurrent requests."""
_MOST_FAILURES = 5
"""Maximum number of reasons for one failure."""


@dataclass(frozen=True)
class Checked:
    """A finding, and the outcome of its repair.

    Attributes:
        finding: the finding.
        repaired: whether it was repaired.
        failure: reason why a repair failed; empty if it succeeded or was not tried.
    """

    finding: Finding
    repaired: bool = False
    failure: str = ""


@dataclass(frozen=True)
class CheckedModel:
    """Result of the check of one model.

    Attributes:
        name: name of the model.
        versions: number of version folders that were checked.
        findings: all findings, repaired or not.
        fix: remedy for the remaining findings; empty if none remain, or if no general remedy applies.
        whole: bytes of weights of those versions in its history whose files are all present, by number.
    """

    name: str
    versions: int
    findings: tuple[Checked, ...]
    fix: str
    whole: Mapping[int, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all findings are repaired."""
        return all(checked.repaired for checked in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "name": self.name,
            "ok": self.ok,
            "versions": self.versions,
            "fix": self.fix,
            "findings": [
                {
                    "number": checked.finding.number,
                    "what": checked.finding.what,
                    "mend": checked.finding.mend.value,
                    "repaired": checked.repaired,
                    "failure": checked.failure,
                }
                for checked in self.findings
            ],
        }


def check_store(
    store: ObjectStore,
    *,
    repair: bool = False,
    drop_damaged: bool = False,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[CheckedModel]:
    """Check all models of a store, and their training states, one after another.

    Args:
        store: the store.
        repair: whether to repair findings.
        drop_damaged: whether to also retire versions whose files are missing, and delete refs to them.
        on_progress: called with the number of checked versions of a model, and their total.

    Raises:
        WeighbridgeError: the store cannot be read.
    """
    heads = HeadStore(store)
    mended = False
    for model in heads.everything():
        survey = survey_model(store, heads, model, on_progress)
        now_ms = int(time.time() * 1000)
        diagnosis = diagnose(survey, now_ms)
        if repair:
            findings = _Repair(store, heads, survey, diagnosis, drop_damaged, now_ms).run()
        else:
            findings = tuple(Checked(finding) for finding in diagnosis.findings)
        left = {checked.finding.mend for checked in findings if not checked.repaired}
        mended = mended or any(each.repaired and each.finding.mend is Mend.HEAD for each in findings)
        whole = {
            number: folder.described.nbytes
            for number, folder in survey.versions.items()
            if folder.whole and folder.described is not None and number in survey.entries
        }
        yield CheckedModel(str(model), len(survey.versions), findings, fix_for(left, repair), whole)
    if mended:
        _repin_all(heads)


def _repin_all(heads: HeadStore) -> None:
    """Pin the bases of all adapters again. A head that was rebuilt from manifests has lost its pins, so a collection
    could delete the bases of adapters.
    """
    for model in heads.models():
        try:
            history = heads.history(model)
            if history is not None and is_adapter_head(history.head):
                repin(heads, model, history)
        except WeighbridgeError as error:  # the next collection of the adapter retries
            log.warning("the bases of %s are not pinned again: %s", model, error)


class _Repair:
    """Repair of one model."""

    def __init__(
        self,
        store: ObjectStore,
        heads: HeadStore,
        survey: Survey,
        diagnosis: Diagnosis,
        drop_damaged: bool,
        now_ms: int,
    ) -> None:
        self._store = store
        self._heads = heads
        self._survey = survey
        self._diagnosis = diagnosis
        self._now_ms = now_ms
        self._dropped = diagnosis.numbers(Mend.DROP) if drop_damaged else ()
        self._identities: dict[tuple[tuple[str, str], ...], str] = {}

    @property
    def _model(self) -> ModelName:
        return self._survey.model

    def run(self) -> tuple[Checked, ...]:
        """Repair the findings, and return each with its outcome."""
        failure = self._failure_of(self._mend_head)
        checked = []
        for finding in self._diagnosis.findings:
            match finding.mend:
                case Mend.NONE:
                    checked.append(Checked(finding))
                case Mend.HEAD:
                    checked.append(Checked(finding, not failure, failure))
                case Mend.DROP:
                    asked = finding.number in self._dropped
                    checked.append(Checked(finding, asked and not failure, failure if asked else ""))
                case Mend.DIGESTS | Mend.FILES | Mend.STRAY:
                    own = failure or self._failure_of(lambda: self._mend(finding))  # noqa: B023
                    checked.append(Checked(finding, not own, own))
        return tuple(checked)

    def _failure_of(self, step: Callable[[], None]) -> str:
        try:
            step()
        except WeighbridgeError as error:
            return str(error)
        return ""

    def _mend(self, finding: Finding) -> None:
        if finding.mend is Mend.FILES:
            self._restore_file(finding.name)
        elif finding.number is not None and finding.mend is Mend.DIGESTS:
            self._restore_digests(finding.number, finding.name)
        elif finding.number is not None:
            self._delete_folder(finding.number)

    # -- the head ----------------------------------------------------------------------------------------------------

    def _mend_head(self) -> None:
        """Write the repaired head, if a finding requires it.

        Raises:
            Conflict: the head has changed since the survey.
            DataLoss: the head or its registration is lost, and the model cannot be registered again from any version.
        """
        survey = self._survey
        if not self._dropped and not any(f.mend is Mend.HEAD for f in self._diagnosis.findings):
            return
        after = repaired_head(survey, self._diagnosis, self._base(), self._entry_of, self._dropped, self._now_ms)
        # names of nodes contain the generation of the head that they were written for, and must not be reused
        base = survey.head or Head()
        base = replace(base, generation=max(base.generation, survey.last_node))
        after = self._heads.settle(self._model, stamp(after, base, uuid.uuid4().hex))
        if survey.head is None and survey.text is not None:
            kept = f"{self._model.prefix}head.damaged-{self._now_ms}.json"
            self._store.put(kept, survey.text, mode="overwrite")
        # the ledger compares generations, which may restart with this head; without a ledger, services count the stored
        # bytes again
        self._store.delete(ledger_key(self._model.namespace))
        mode: PutMode = "create" if survey.etag is None else IfMatch(survey.etag)
        try:
            self._store.put(self._model.head_key, after.to_json(), mode=mode)
        except Conflict as error:
            raise Conflict(
                (
                    f"{self._model} was changed in the meantime, or something other than an object "
                    "has the name of its head"
                ),
                fix=f"stop all services of this store, check what {self._model.head_key} is, and try again",
            ) from error

    def _base(self) -> Head:
        """The head to repair: the current one, or a new one with only a registration."""
        head = self._survey.head
        if head is not None and not self._survey.unregistered:
            return head
        if self._model.part:
            of = self._heads.read_any(self._model.model)
            return with_part(self._model, head or Head(), of[0] if of else Head(), self._now_ms)
        registered = self._registered()
        return replace(head or Head(), files_id=registered.files_id, registration=registration_of(registered))

    def _registered(self) -> RegisteredModel:
        """Register the model from the newest version that allows it, and write the registration's files. Raises
        DataLoss if no version allows it.
        """
        versions, entries = self._survey.versions, self._survey.entries
        failures = []
        for number in sorted(versions, reverse=True):
            listed = number in entries and not entries[number].retired
            if versions[number].whole and (listed or number in self._diagnosis.adopted):
                try:
                    return self._registered_as(number)
                except WeighbridgeError as error:
                    failures.append(f"{self._model}@{number}: {error.message}")
        raise DataLoss(
            f"no version of {self._model} can register it" if failures else f"no version of {self._model} is whole",
            details=failures[:_MOST_FAILURES],
            fix=(
                "restore head.json from a backup; if the model never had a version, delete the "
                "rest of it and register it again"
            ),
        )

    def _registered_as(self, number: int) -> RegisteredModel:
        files = self._side_files(number)
        manifest = read_manifest(self._store, self._model, number)
        specs = [TensorSpec(name, entry.dtype, entry.shape) for name, entry in manifest.tensors.items()]
        head = self._survey.head
        try:
            registered = model_for_registration(self._model, files, "", specs, head)
        except InvalidArgument:  # the model may have been registered without the weight map of its type
            registered = model_for_registration(self._model, files, "", specs, head, weight_map=False)
        if registered.listed is not None:
            write_tensor_list(self._store, self._model, registered.listed, first_version_of(registered.files_id))
        for name, content in files.items():
            self._store.put(files_key(self._model, registered.files_id, name), content, mode="overwrite")
        return registered

    def _side_files(self, number: int) -> dict[str, bytes]:
        """Files of a version other than weights, verified against its manifest. Raises DataLoss if one differs."""
        files = side_files(self._store, self._model, number)
        roots = self._described(number).side_files
        for name, content in files.items():
            if digest_bytes(content).blake3 != roots[name]:
                raise DataLoss(f"{name} of {self._model}@{number} does not agree with its digest")
        return files

    def _entry_of(self, number: int) -> VersionEntry:
        said, head = self._described(number), self._survey.head
        listed = self._survey.entries.get(number)
        if listed is None:
            there = head.open.get(number) if head is not None else None
            claim = (there.claim if there is not None else "") or f"fsck-{uuid.uuid4().hex}"
            ranks = there.ranks if there is not None else 0
            # approvals after the manifest was written are known only for a version that is still open in the head
            held = said.held if there is None else there.holding(said.held)
            listed = VersionEntry(
                number,
                0,
                "",
                0,
                0,
                0,
                self._files_id(number),
                claim,
                ranks=ranks,
                held=held,
                metadata=said.metadata,
                approval=None if there is None else there.approval,
                traceparent="" if there is None else there.traceparent,
            )
        return replace(
            listed,
            step=said.step,
            run=said.run,
            created_ms=said.created_ms,
            nbytes=said.nbytes,
            tensor_count=said.tensor_count,
            nonfinite_elements=said.nonfinite_elements,
            tensor_bytes=said.tensor_bytes if self._model.part else 0,
        )

    def _files_id(self, number: int) -> str:
        """Identity of a version's registered files; empty if one is missing or damaged.

        Each set of files is read once.
        """
        key = tuple(sorted(self._described(number).side_files.items()))
        if key not in self._identities:
            try:
                self._identities[key] = files_identity(self._side_files(number))
            except (DataLoss, NotFound):  # the weights are still usable
                return ""
        return self._identities[key]

    def _described(self, number: int) -> SurveyedVersion:
        found = self._survey.versions[number].described
        if found is None:
            raise DataLoss(f"{self._model}@{number} has no manifest")
        return found

    # -- other objects -----------------------------------------------------------------------------------------------

    def _restore_digests(self, number: int, name: str) -> None:
        manifest = read_manifest(self._store, self._model, number)
        tensors = tensors_of_files(manifest).get(name, ())
        found = digest_object(self._store, version_key(self._model, number, name), name, tensors)
        if not found.entry.same_content(manifest.files[name]):
            raise DataLoss(
                f"{name} of {self._model}@{number} does not agree with its digest",
                details=[
                    f"tensor {tensor} does not"
                    for tensor, entry in tensors
                    if found.tensors[tensor].xxh3_128 != entry.xxh3_128
                ][:_MOST_FAILURES],
                fix="restore the file from a backup",
            )
        self._store.put(blocks_key(self._model, number, name), found.blocks, mode="overwrite")

    def _restore_file(self, name: str) -> None:
        head = self._survey.head
        if head is None:
            return
        for number, folder in self._survey.versions.items():
            entry = self._survey.entries.get(number)
            if entry is None or entry.files_id != head.files_id or not folder.whole:
                continue
            try:
                content = self._side_files(number)[name]
            except (DataLoss, NotFound, KeyError):
                continue  # another version may have an intact copy
            self._store.put(files_key(self._model, head.files_id, name), content, mode="overwrite")
            return
        raise NotFound(f"no version has {name} as it is registered", fix="register the model again")

    def _delete_folder(self, number: int) -> None:
        """Delete all objects of a version number.

        The manifest is deleted first, because its presence marks a folder as complete.
        """
        keys = self._survey.folders[number]
        manifest = version_key(self._model, number, MANIFEST_FILE)
        if manifest in keys:
            self._store.delete(manifest)
        with ThreadPoolExecutor(_DELETIONS, thread_name_prefix="delete") as pool:
            for _ in pool.map(self._store.delete, (key for key in keys if key != manifest)):
                pass


def fix_for(left: AbstractSet[Mend], repair: bool) -> str:
    """Remedy for the remaining findings.

    Args:
        left: repairs that these findings need.
        repair: whether a repair was requested.
    """
    steps = []
    if not repair and left - {Mend.NONE, Mend.DROP}:
        steps.append("stop all services of the store, then run again with --repair")
    if Mend.DROP in left:
        steps.append("restore missing files from a backup, or give the versions up with --repair --drop-damaged")
    return "; ".join(steps)
