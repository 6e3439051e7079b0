"""The service: what there is, what comes in, what goes out. The gRPC and HTTP faces translate to it and decide nothing."""

from __future__ import annotations

import socket
import uuid

from weighbridge_service.byte_budget import ByteBudget
from weighbridge_service.catalog import Catalog
from weighbridge_service.collecting import Collecting
from weighbridge_service.config import ServiceConfig
from weighbridge_service.push.declarations import Home
from weighbridge_service.push.intake import Intake
from weighbridge_service.push.mappings import Mappings
from weighbridge_service.serving import Serving
from weighbridge_storage.block_cache import BlockCache
from weighbridge_storage.block_file import check_holes
from weighbridge_storage.images import ImagePool
from weighbridge_storage.opening import open_store
from weighbridge_storage.probe import probe
from weighbridge_storage.s3_settings import is_s3


class Weighbridge:
    """One service over one object store. Everything it has is safe to use from many threads.

    Args:
        config: its settings.
        port: at which it answers gRPC calls.

    Raises:
        FailedPrecondition: the store does not keep conditional writes, or the scratch folder's file system cannot hold a
            read cache for it.
        InvalidArgument: a setting cannot be.
        WeighbridgeError: the store cannot be opened or used.
        OSError: the scratch folder cannot be made.

    Attributes:
        catalog: models, versions and refs.
        intake: versions on their way in.
        serving: versions on their way out.
        collecting: which versions are kept.
        images: where versions are put together.
        mappings: which processes of this machine have them mapped.
        byte_budget: what may be in flight over gRPC.
        read_cache: what was brought from a store that is no folder.
        store_readers: who is reading from the store.
    """

    def __init__(self, config: ServiceConfig, port: int) -> None:
        self.config = config
        grace = config.grace
        self.byte_budget = ByteBudget(config.byte_budget)
        scratch = config.scratch_folder / ".images"
        scratch.mkdir(parents=True, exist_ok=True)
        self.read_cache = BlockCache(scratch, config.read_cache)
        if is_s3(config.store):
            check_holes(scratch)
        self._store = open_store(config.store)
        try:
            probe(self._store)
        except BaseException:
            self._store.close()
            raise
        self.mappings = Mappings()
        self.images = ImagePool(config.memory_budget, scratch, self.mappings.recall)
        self.catalog = Catalog(self._store, grace)
        home = Home(_address(config.advertise, port), uuid.uuid4().hex)
        self.intake = Intake(self.catalog, self.images, self.mappings, config, home)
        self.store_readers = self.catalog.readers
        self.serving = Serving(self.catalog, self.read_cache, self.store_readers)
        self.collecting = Collecting(self.catalog, config.collect_every, self.serving.forget_deleted)

    @property
    def draining(self) -> bool:
        """Whether the service is shutting down."""
        return self.intake.draining

    def drain(self) -> bool:
        """Refuse new versions, wait for those under way, and stop; whether all of them were finished."""
        finished = self.intake.drain(self.config.drain_seconds)
        self._stop()
        return finished

    def close(self) -> None:
        """Let go of files and memory. Call `drain` before."""
        self._stop()
        self.catalog.readers.close()
        self.images.trim()
        self.read_cache.close()
        self._store.close()

    def _stop(self) -> None:
        self.catalog.stopping.set()
        self.catalog.notify()
        self.intake.stop()
        self.collecting.join()


def _address(advertise: str, port: int) -> str:
    """Where other replicas reach this process; the parts that ``advertise`` leaves open are completed."""
    host, _, advertised = advertise.rpartition(":")
    return f"{host or socket.gethostname()}:{port if advertised in ('', '0') else advertised}"
