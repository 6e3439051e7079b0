"""Check of a store, model by model, and repair of what is wrong.

A repair writes the head last but for deletions, on condition that it is as it was surveyed. So it can be broken off anywhere and be
done again, and fails where a service changes the model meanwhile.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weighbridge.errors import Conflict, DataLoss, NotFound, WeighbridgeError
from weighbridge.layouts import TensorSpec
from weighbridge_service.fsck.diagnosis import Diagnosis, Finding, Mend, diagnose, repaired_head
from weighbridge_service.fsck.survey import Survey, survey_model
from weighbridge_service.models import (
    files_identity,
    files_key,
    model_for_registration,
    registration_of,
)
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import stamp
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.manifest import Manifest
from weighbridge_storage.names import ModelName, blocks_key, version_key
from weighbridge_storage.objects import IfMatch, ObjectStore, PutMode
from weighbridge_storage.version_reading import side_files, tensors_of_files
from weighbridge_storage.version_verifying import digest_object


@dataclass(frozen=True)
class Checked:
    """A finding, and what became of it.

    Attributes:
        finding: what is wrong.
        repaired: whether it is mended.
        failure: why it could not be, if that was tried.
    """

    finding: Finding
    repaired: bool = False
    failure: str = ""


@dataclass(frozen=True)
class CheckedModel:
    """What the check of one model has found.

    Attributes:
        name: which model.
        versions: how many folders of versions were looked at.
        findings: what is wrong, or was.
    """

    name: str
    versions: int
    findings: tuple[Checked, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more."""
        return all(checked.repaired for checked in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "name": self.name,
            "ok": self.ok,
            "versions": self.versions,
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
    store: ObjectStore, *, repair: bool = False, drop_damaged: bool = False
) -> Iterator[CheckedModel]:
    """Check all models of a store, one after another.

    Args:
        store: the store.
        repair: mend what is wrong.
        drop_damaged: also retire versions whose files are missing, with the refs that name them.

    Raises:
        WeighbridgeError: the store cannot be read.
    """
    heads = HeadStore(store)
    for model in heads.models():
        survey = survey_model(store, heads, model)
        now_ms = int(time.time() * 1000)
        diagnosis = diagnose(survey, now_ms)
        if repair:
            findings = _Repair(store, heads, survey, diagnosis, drop_damaged, now_ms).run()
        else:
            findings = tuple(Checked(finding) for finding in diagnosis.findings)
        yield CheckedModel(str(model), len(survey.versions), findings)


class _Repair:
    """The repair of one model."""

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
        """Mend what can be; what became of each finding."""
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
            return error.message
        return ""

    def _mend(self, finding: Finding) -> None:
        if finding.mend is Mend.FILES:
            self._restore_file(finding.name)
        elif finding.number is not None and finding.mend is Mend.DIGESTS:
            self._restore_digests(finding.number, finding.name)
        elif finding.number is not None:
            for key in self._survey.folders[finding.number]:
                self._store.delete(key)

    # -- the head ----------------------------------------------------------------------------------------------------

    def _mend_head(self) -> None:
        """Write the head that would be right, if it is another one.

        Raises:
            Conflict: somebody else has changed it.
            DataLoss: it is lost, and there is no version by which the model could be registered again.
        """
        survey = self._survey
        if not self._dropped and not any(f.mend is Mend.HEAD for f in self._diagnosis.findings):
            return
        base = survey.head or self._registered()
        after = repaired_head(survey, self._diagnosis, base, self._entry_of, self._dropped, self._now_ms)
        # no name of a node is used twice: a node has the generation of the head for which it was written
        base = replace(base, generation=max(base.generation, survey.last_node))
        after = self._heads.settle(self._model, stamp(after, base, uuid.uuid4().hex))
        if survey.head is None and survey.text is not None:
            kept = f"{self._model.prefix}head.damaged-{self._now_ms}.json"
            self._store.put(kept, survey.text, mode="overwrite")
        mode: PutMode = "create" if survey.etag is None else IfMatch(survey.etag)
        try:
            self._store.put(self._model.head_key, after.to_json(), mode=mode)
        except Conflict as error:
            raise Conflict(
                f"{self._model} was changed meanwhile", fix="stop all services of this store, and try again"
            ) from error

    def _registered(self) -> Head:
        """A head that has only the registration, derived from the newest whole version; its files are in their place on return."""
        if not self._diagnosis.adopted:
            raise DataLoss(
                f"no version of {self._model} is whole, so its head cannot be rebuilt",
                fix="restore head.json from a backup, or register the model again",
            )
        number = self._diagnosis.adopted[-1]
        manifest = self._manifest(number)
        files = side_files(self._store, self._model, number)
        specs = [TensorSpec(name, entry.dtype, entry.shape) for name, entry in manifest.tensors.items()]
        registered = model_for_registration(self._model, files, "", specs)
        for name, content in files.items():
            self._store.put(files_key(self._model, registered.files_id, name), content, mode="overwrite")
        return Head(files_id=registered.files_id, registration=registration_of(registered))

    def _entry_of(self, number: int) -> VersionEntry:
        manifest, head = self._manifest(number), self._survey.head
        there = head.open.get(number) if head is not None else None
        return VersionEntry(
            number=number,
            step=manifest.step,
            run=manifest.run,
            created_ms=manifest.created_ms,
            nbytes=sum(manifest.files[name].size for name in manifest.weight_files),
            tensor_count=len(manifest.tensors),
            files_id=self._files_id(number, manifest),
            write_id=(there.claim if there is not None else "") or f"fsck-{uuid.uuid4().hex}",
            ranks=there.ranks if there is not None else 0,
            nonfinite_elements=manifest.nonfinite_elements,
        )

    def _files_id(self, number: int, manifest: Manifest) -> str:
        """Identity of a version's registered files; each set of files is read once."""
        names = manifest.files.keys() - manifest.weight_files
        key = tuple(sorted((name, manifest.files[name].blake3) for name in names))
        if key not in self._identities:
            self._identities[key] = files_identity(side_files(self._store, self._model, number))
        return self._identities[key]

    def _manifest(self, number: int) -> Manifest:
        manifest = self._survey.versions[number].manifest
        if manifest is None:
            raise DataLoss(f"{self._model}@{number} has no manifest")
        return manifest

    # -- other objects -----------------------------------------------------------------------------------------------

    def _restore_digests(self, number: int, name: str) -> None:
        manifest = self._manifest(number)
        key = version_key(self._model, number, name)
        found = digest_object(self._store, key, name, tensors_of_files(manifest).get(name, ()))
        if not found.entry.same_content(manifest.files[name]):
            raise DataLoss(f"{name} of {self._model}@{number} does not agree with its digest")
        self._store.put(blocks_key(self._model, number, name), found.blocks, mode="overwrite")

    def _restore_file(self, name: str) -> None:
        head = self._survey.head
        entries: Mapping[int, VersionEntry] = self._survey.entries
        for number, folder in self._survey.versions.items():
            entry = entries.get(number)
            if head is None or entry is None or entry.files_id != head.files_id:
                continue
            if folder.whole and folder.manifest is not None and name in folder.manifest.files:
                source = version_key(self._model, number, name)
                self._store.copy(source, files_key(self._model, head.files_id, name))
                return
        raise NotFound(f"no version has {name} as it is registered")
