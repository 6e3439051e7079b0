"""Collection of each model's versions, on request and periodically."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from weighbridge._core.pauses import DICE
from weighbridge._core.reports.collection import Collection
from weighbridge._core.resources import DeletedModel, Retention, Version, VersionState
from weighbridge._core.text.counts import counted
from weighbridge.errors import FailedPrecondition, NotFound, WeighbridgeError
from weighbridge_service.catalog.bases import Bases
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.models.registration import is_part_of
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import delete_model, delete_versions
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import give_up_ended
from weighbridge_storage.head.pins import sees_all

log = logging.getLogger(__name__)

_LOOKED_AT = 100
"""Maximum number of pins of a base that one collection checks. Each check reads the head of an adapter."""


class Collecting:
    """Retention of versions. Thread-safe; any number of replicas may collect at the same time.

    Args:
        catalog: the registered models.
        every_s: seconds between two collections of all models by this process, on average; 0 for none.
        on_collected: called with each model that this process has collected, and its history.

    Attributes:
        versions_deleted: number of versions whose objects this process has deleted.
        bytes_deleted: bytes of their weights.
        failures: number of failed collections, and of failed deletions within others.
    """

    def __init__(
        self,
        catalog: Catalog,
        every_s: float,
        on_collected: Callable[[ModelName, History], None],
    ) -> None:
        self._catalog = catalog
        self._bases = Bases(catalog)
        self._on_collected = on_collected
        self._served: Callable[[ModelName], Mapping[int, Sequence[str]]] = lambda _: {}
        self._every_s = every_s
        self._counting = threading.Lock()
        self.versions_deleted = 0
        self.bytes_deleted = 0
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        if every_s:
            self._thread.start()

    def keep_served(self, served: Callable[[ModelName], Mapping[int, Sequence[str]]]) -> None:
        """Keep the versions of a model that engines serve: ``served`` returns the names of the engines by version
        number.
        """
        self._served = served

    def set_retention(self, name: str, retention: Retention) -> Retention:
        """Set which versions of a model are kept, from the next collection on.

        The model of a training state need not exist yet. Raises NotFound.
        """
        model = ModelName.parse(name)
        if model.part:
            self._catalog.register_part(model)
        return self._catalog.keep(name, retention)

    def delete_version(
        self,
        name: str,
        number: int,
        *,
        forced: bool = False,
        sees: Callable[[str], bool] = sees_all,
    ) -> Version:
        """Take a version out of history. A collection deletes its objects after the grace time.

        Args:
            name: ``namespace/name``.
            number: number of the version.
            forced: whether to delete it even if adapters are based on it; their versions then show an error.
            sees: returns whether the caller may know of a model of this name.

        Returns:
            The version, which can be read by its number until its objects are deleted.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: a ref names the version, it is not durable yet, or adapters are based on it.
        """
        model, clock = ModelName.parse(name), self._catalog.readers.clock
        if not forced:
            self._release(model, number)

        def change(history: History) -> tuple[Head, None]:
            return delete_versions(history, [number], clock(), model=model, forced=forced, sees=sees), None

        self._catalog.heads.edit(model, change)
        self._catalog.changes.notify(model)
        return self._catalog.resolve(model, str(number))

    def delete_model(
        self,
        name: str,
        request_id: str = "",
        *,
        forced: bool = False,
        sees: Callable[[str], bool] = sees_all,
    ) -> DeletedModel:
        """Delete a model with all of its versions, refs and rules, and its training states.

        Collections delete the objects.

        The deletion is one change of the model's head, so a crash leaves nothing half done. Other replicas see it when
        they next read the head. The training states are deleted afterwards; if that fails, a collection deletes them.

        Args:
            name: ``namespace/name``.
            request_id: id that is the same in retries of a request, which then do not delete a model again that was
                registered since.
            forced: whether to delete it even if adapters are based on its versions; their versions then show an error.
            sees: returns whether the caller may know of a model of this name.

        Raises:
            NotFound: the model does not exist.
            FailedPrecondition: versions are being received, or adapters are based on versions of the model.
        """
        model, clock = ModelName.parse(name), self._catalog.readers.clock
        part = None if model.part else self._catalog.heads.history(model.training)
        if part is not None:
            # check first what would be refused after the model is deleted
            delete_model(self._without_given_up(model.training, part.head), clock())
        deleted = self._delete_model(model, request_id, forced=forced, sees=sees)
        if part is not None:
            try:
                self._delete_model(model.training, request_id)
            except FailedPrecondition as error:  # a push of one has begun since; callers no longer see it
                log.warning("%s will be deleted later: %s", model.training, error)
        return deleted

    def _delete_model(
        self,
        model: ModelName,
        request_id: str,
        *,
        forced: bool = False,
        sees: Callable[[str], bool] = sees_all,
    ) -> DeletedModel:
        clock = self._catalog.readers.clock
        there = self._catalog.heads.read_any(model)
        done = None if there is None else there[0].deletion
        if request_id and done is not None and done.request_id == request_id:
            return DeletedModel(str(model), done.versions)
        known = self._catalog.heads.history(model) or self._catalog.history(model)
        if not forced:
            self._release(model)
        count = len(known.versions())

        def change(history: History) -> tuple[Head, tuple[History, Head]]:
            head = self._without_given_up(model, history.head)
            after = delete_model(head, clock(), request_id=request_id, versions=count, forced=forced, sees=sees)
            return after, (history, after)

        before, after = self._catalog.heads.edit(model, change)
        self._catalog.forget_model(model)
        self._on_collected(model, before.under(after))
        log.warning("deleted %s with %s", model, counted(count, "version"))
        return DeletedModel(str(model), count)

    def _without_given_up(self, model: ModelName, head: Head) -> Head:
        """The head without open versions that this process has given up: callers learn of that before the head is
        written.
        """
        for number, known in self._catalog.snapshots.of_model(model).items():
            version, there = known.version, head.open.get(number)
            if not version.state.given_up or there is None:
                continue
            # other replicas may continue a claimed version that failed here
            if version.state is VersionState.ABORTED or not there.claim:
                head = give_up_ended(head, version, self._catalog.readers.clock())
        return head

    def collect(self, name: str, *, dry_run: bool = False) -> Collection:
        """Delete the versions of one model that need not be kept. A dry run only reports them.

        Raises:
            NotFound: the model does not exist.
            WeighbridgeError: the store failed before anything could be done.
        """
        catalog, model = self._catalog, ModelName.parse(name)
        if not dry_run:
            self._release(model, most=_LOOKED_AT, renew=True)
        report = collect(
            catalog.store,
            catalog.heads,
            model,
            grace=catalog.readers.grace,
            clock=catalog.readers.clock,
            dry_run=dry_run,
            stopping=catalog.stopping.is_set,
            served=lambda: self._served(model),
            present=lambda: catalog.snapshots.present(model),
        )
        if not dry_run:
            with self._counting:
                self.versions_deleted += len(report.deleted)
                self.bytes_deleted += report.deleted_bytes
                self.failures += len(report.problems)
            _log(report)
            history = catalog.heads.history_of_any(model)
            if history is not None:
                self._on_collected(model, history)
            catalog.changes.notify(model)
        return report

    def _release(
        self, model: ModelName, number: int | None = None, most: int | None = None, *, renew: bool = False
    ) -> None:
        """Remove the pins of versions on which no adapter is based any more.

        With ``renew``, also pin the bases of this adapter's versions.

        A failure is left to the next collection: a stale pin only keeps a version longer, and retention reads no head
        but the model's own.
        """
        try:
            self._bases.release(model, number, most)
            if renew:
                self._bases.renew(model)
        except WeighbridgeError as error:
            log.warning("pins of %s stay unchanged for now: %s", model, error)

    def collect_all(self) -> None:
        """Collect all models; a failure of one does not stop the others."""
        for model in self._catalog.heads.everything():
            if self._catalog.stopping.is_set():
                return
            try:
                if model.part and self._is_left(model):
                    self._delete_model(model, "")
                self.collect(str(model))
            except NotFound:  # its registration was never completed
                continue
            except WeighbridgeError as error:
                self._failed(str(model), error)

    def _is_left(self, part: ModelName) -> bool:
        """Whether a part belongs to a deleted model.

        False if the model has only lost its head, which can be rebuilt.
        """
        heads = self._catalog.heads
        found, of = heads.history(part), heads.read_any(part.model)
        return found is not None and of is not None and not is_part_of(found.head, of[0])

    def _run(self) -> None:
        # at random times, so that replicas do not collect together; not at once, as a starting service has more urgent
        # work
        while not self._catalog.stopping.wait(self._every_s * DICE.uniform(0.5, 1.5)):
            try:
                self.collect_all()
            except Exception as error:  # the next round retries
                self._failed("models", error)

    def _failed(self, what: str, error: Exception) -> None:
        with self._counting:
            self.failures += 1
        log.warning("collecting %s failed, and will be tried again: %s", what, error)

    def join(self) -> None:
        """Wait for this object's own thread, after the catalog's `stopping` was set."""
        if self._thread.ident is not None:
            self._thread.join()


def _log(report: Collection) -> None:
    for problem in report.problems:
        log.warning("collecting %s: %s", report.model, problem)
    # versions that are kept or wait are no news
    done = replace(report, kept=(), waiting=(), problems=())
    if done != Collection(report.model, report.dry_run):
        log.info(
            "collected %s: retired %s, deleted %s (%d bytes), gave up %s, swept %s, discarded %s",
            report.model,
            list(report.retired),
            [version.number for version in report.deleted],
            report.deleted_bytes,
            list(report.given_up),
            [version.number for version in report.swept],
            counted(report.uploads_discarded, "upload"),
        )
