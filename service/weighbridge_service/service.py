"""The service: what there is, what comes in, what goes out. The gRPC and HTTP faces translate to it and decide nothing."""

from __future__ import annotations

from weighbridge_service.catalog import Catalog
from weighbridge_service.collecting import Collecting
from weighbridge_service.config import ServiceConfig
from weighbridge_service.intake import Intake
from weighbridge_service.serving import Serving
from weighbridge_storage.images import ImagePool
from weighbridge_storage.opening import open_store
from weighbridge_storage.probe import probe


class Weighbridge:
    """One service over one object store. Everything it has is safe to use from many threads.

    Args:
        config: its settings.

    Raises:
        InvalidArgument: a setting cannot be.
        FailedPrecondition: the store does not keep conditional writes.
        WeighbridgeError: the store cannot be opened or used.
        OSError: the scratch folder cannot be made.

    Attributes:
        catalog: models, versions and refs.
        intake: versions on their way in.
        serving: versions on their way out.
        collecting: which versions are kept.
        images: where versions are put together.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        grace = config.grace
        scratch = config.scratch_folder / ".images"
        scratch.mkdir(parents=True, exist_ok=True)
        self._store = open_store(config.store, scratch=scratch)
        try:
            probe(self._store)
        except BaseException:
            self._store.close()
            raise
        self.images = ImagePool(config.memory_budget, scratch)
        self.catalog = Catalog(self._store, grace)
        self.intake = Intake(self.catalog, self.images, config)
        self.serving = Serving(self.catalog)
        self.collecting = Collecting(self.catalog, config.collect_every)

    @property
    def draining(self) -> bool:
        """Whether the service is shutting down."""
        return self.intake.draining

    def drain(self) -> bool:
        """Refuse new versions, wait for those under way, and stop; whether all of them were finished."""
        self.intake.draining = True
        self.intake.publisher.hurry()
        with self.catalog.changed:
            finished = self.catalog.changed.wait_for(
                lambda: not self.catalog.has_unfinished(), self.config.drain_seconds
            )
        self._stop()
        return finished

    def close(self) -> None:
        """Let go of files and memory. Call `drain` before."""
        self._stop()
        self.catalog.readers.close()
        self.images.trim()
        self._store.close()

    def _stop(self) -> None:
        self.catalog.stopping.set()
        self.catalog.notify()
        self.intake.join()
        self.collecting.join()
