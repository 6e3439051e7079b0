"""Collection of each model's versions: when it is asked for, and by itself."""

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
"""Pins of a base of which a collection looks whether they are still needed: it reads the head of each one's adapter."""


class Collecting:
    """Retention of versions. Thread-safe; any number of replicas may do it at a time.

    Args:
        catalog: which models there are.
        every_s: seconds between two collections of all models by this process, on average; 0 for none.
        on_collected: is told of each model that this process has collected, and its history.

    Attributes:
        versions_deleted: versions whose objects this process has deleted.
        bytes_deleted: bytes of their weights.
        failures: collections that failed, and deletions within others.
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
        """Keep the versions of a model that engines serve: ``served`` names the engines by the number of the version."""
        self._served = served

    def set_retention(self, name: str, retention: Retention) -> Retention:
        """Set which versions of a model are kept, from the next collection on. The model of a training state need not exist yet. Raises NotFound."""
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
        """Take a version out of history; its objects go with a collection after the grace time.

        Args:
            name: ``namespace/name``.
            number: of the version.
            forced: whether it is deleted although adapters are on it, which then say that they lack it.
            sees: whether the caller may know of a model of this name.

        Returns:
            The version, which can be read by its number until then.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: a ref names the version, it is not durable yet, or adapters are on it.
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
        """Take a model away with all of its versions, refs and rules, and its training states; its objects go with collections.

        One change of the model's head: there is nothing that a crash could leave half done. Other replicas find it with their next reading
        of it. The training states are deleted behind it; a collection does that if it was not.

        Args:
            name: ``namespace/name``.
            request_id: the same in repetitions of a request: what it has deleted before is not deleted again.
            forced: whether it is deleted although adapters are on versions of it, which then say that they lack them.
            sees: whether the caller may know of a model of this name.

        Raises:
            NotFound: no such model.
            FailedPrecondition: versions are being received, or adapters are on versions of the model.
        """
        model, clock = ModelName.parse(name), self._catalog.readers.clock
        part = None if model.part else self._catalog.heads.history(model.training)
        if part is not None:
            # refuses what would be refused when the model is gone
            delete_model(self._without_given_up(model.training, part.head), clock())
        deleted = self._delete_model(model, request_id, forced=forced, sees=sees)
        if part is not None:
            try:
                self._delete_model(model.training, request_id)
            except FailedPrecondition as error:  # a push of one has begun meanwhile; nobody sees it any more
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
            after = delete_model(
                head, clock(), request_id=request_id, versions=count, forced=forced, sees=sees
            )
            return after, (history, after)

        before, after = self._catalog.heads.edit(model, change)
        self._catalog.forget_model(model)
        self._on_collected(model, before.under(after))
        log.warning("deleted %s with %s", model, counted(count, "version"))
        return DeletedModel(str(model), count)

    def _without_given_up(self, model: ModelName, head: Head) -> Head:
        """The head without open versions that this process has given up: a caller hears of that before the head is written."""
        for number, known in self._catalog.snapshots.of_model(model).items():
            version, there = known.version, head.open.get(number)
            if not version.state.given_up or there is None:
                continue
            # other replicas may go on with one that failed here
            if version.state is VersionState.ABORTED or not there.claim:
                head = give_up_ended(head, version, self._catalog.readers.clock())
        return head

    def collect(self, name: str, *, dry_run: bool = False) -> Collection:
        """Delete what need not be kept of one model; in a dry run, only say what that would be.

        Raises:
            NotFound: no such model.
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
        """Give versions free that no adapter is on any more; and pin again those on which versions of this adapter are, if that is asked for.

        What fails is left to another time: a pin that stays keeps a version that need not be kept, and the retention decides by no head but the model's own.
        """
        try:
            self._bases.release(model, number, most)
            if renew:
                self._bases.renew(model)
        except WeighbridgeError as error:
            log.warning("pins of %s are left as they are for now: %s", model, error)

    def collect_all(self) -> None:
        """Collect all models; one that fails stops no other."""
        for model in self._catalog.heads.everything():
            if self._catalog.stopping.is_set():
                return
            try:
                if model.part and self._is_left(model):
                    self._delete_model(model, "")
                self.collect(str(model))
            except NotFound:  # it was never registered to the end
                continue
            except WeighbridgeError as error:
                self._failed(str(model), error)

    def _is_left(self, part: ModelName) -> bool:
        """Whether a part is left of a model that was deleted. One whose model has lost its head is not: that can be made again."""
        heads = self._catalog.heads
        found, of = heads.history(part), heads.read_any(part.model)
        return found is not None and of is not None and not is_part_of(found.head, of[0])

    def _run(self) -> None:
        # at other times than the other replicas, and not at once: a service that starts has better things to do
        while not self._catalog.stopping.wait(self._every_s * DICE.uniform(0.5, 1.5)):
            try:
                self.collect_all()
            except Exception as error:  # there will be another time
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
    # what is kept or waits says nothing new
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
