"""Gate of models: which versions are held, and approval of those that are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from weighbridge._core.resources import REQUEST_DONE, Gate, Version, VersionState
from weighbridge.errors import FailedPrecondition, NotFound, VersionFailed, WeighbridgeError
from weighbridge_service.access.audit import note as note_change
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import Approval
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_changes import approve, set_gate
from weighbridge_storage.head.history import History

log = logging.getLogger(__name__)


class Gates:
    """The gates of all models. Thread-safe; any number of replicas may change them at a time.

    Args:
        catalog: which models there are.
        on_approved: is told of each version that was approved here, and for which reasons.
    """

    def __init__(
        self, catalog: Catalog, on_approved: Callable[[ModelName, int, tuple[str, ...]], None]
    ) -> None:
        self._catalog = catalog
        self._on_approved = on_approved

    @property
    def held(self) -> int:
        """Held versions that this process has received, as the store has them now: others may have approved or deleted them.

        Of a model whose head cannot be read, as this process has heard of them last.
        """
        return sum(self._held_of(model, numbers) for model, numbers in self._catalog.snapshots.held.items())

    def _held_of(self, model: ModelName, numbers: list[int]) -> int:
        try:
            history = self._catalog.history(model)
        except NotFound:
            return 0
        except WeighbridgeError:
            return len(numbers)
        return sum(self._is_held(model, number, history) for number in numbers)

    def _is_held(self, model: ModelName, number: int, history: History) -> bool:
        try:
            version = self._catalog.resolve(model, str(number), history)
        except (NotFound, VersionFailed):  # deleted, or given up meanwhile
            return False
        except WeighbridgeError:
            return True
        return bool(version.held) and version.state is not VersionState.RETIRED

    def gate(self, name: str) -> Gate:
        """Which versions of a model are held. Raises NotFound."""
        return self._catalog.head(ModelName.parse(name)).gate

    def set_gate(self, name: str, gate: Gate) -> Gate:
        """Say which versions of a model are held, of those that are opened from now on. Raises NotFound."""
        model = ModelName.parse(name)
        before = self._catalog.heads.update(model, lambda head: (set_gate(head, gate), head.gate))
        note_change(before=before.to_json(), after=gate.to_json(), state=REQUEST_DONE)
        self._catalog.changes.notify(model)
        return gate

    def approve(self, name: str, number: int, *, by: str, note: str, reasons: Iterable[str] = ()) -> Version:
        """Hold a version no longer for some of the reasons for which it is held. One that is not held for these stays as it is.

        Args:
            name: the model.
            number: which version.
            by: who approves it, in their own words.
            note: is kept with that.
            reasons: which; none stands for all that there are now.

        Returns:
            The version after that.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is not complete yet, or was taken out of history.
            VersionFailed: it has failed.
            InvalidArgument: a text is too long, or not printable.
        """
        model = ModelName.parse(name)
        found = self._catalog.resolve(model, str(number))
        if found.state is VersionState.RETIRED:
            raise FailedPrecondition(f"{found} was taken out of history", fix="push its weights again")
        wanted = {*reasons} or {*found.held}
        note_change(version=number, before=list(found.held))
        approved = tuple(reason for reason in found.held if reason in wanted)
        if not approved:
            return found
        approval = Approval(approved, by, unix_ms(), note)
        self._catalog.heads.edit(model, lambda history: (approve(history, number, approval), None))
        log.info("%s was approved by %s: %s", found, by or "nobody who is named", note or "no note")
        self._on_approved(model, number, approved)
        self._catalog.changes.notify(model)
        after = self._catalog.resolve(model, str(number))
        note_change(after=list(after.held), state=REQUEST_DONE)
        return after
