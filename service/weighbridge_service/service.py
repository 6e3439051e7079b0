"""Service: the core, with the packages that plug into it."""

from __future__ import annotations

from weighbridge._signing.checking import check_about
from weighbridge_service.core import Core, Plugged
from weighbridge_service.engines.entries import Leases
from weighbridge_service.engines.exchange import EngineExchange
from weighbridge_service.engines.known_engines import KnownEngines
from weighbridge_service.engines.registry import EngineRegistry
from weighbridge_service.metrics.instruments import PushInstruments, StoreInstruments
from weighbridge_service.runtime.config import ServiceConfig


class Weighbridge(Core):
    """The whole service over one object store.

    Args:
        config: settings of the service.
        port: port for gRPC calls.

    Raises:
        See `Core`.

    Attributes:
        engines: engines that serve versions, as their agents report.
        push_figures, store_figures: instruments for pushes, and for control calls to the store.
    """

    def __init__(self, config: ServiceConfig, port: int) -> None:
        self.push_figures, self.store_figures = PushInstruments(), StoreInstruments()
        super().__init__(config, port, Plugged(self.push_figures, self.store_figures.count, check_about))
        self.engines = KnownEngines(self.catalog, EngineRegistry(Leases(config.report_every)))
        self.collecting.keep_served(self.engines.served)
        self._exchange: EngineExchange | None = None
        if config.advertise:
            self._exchange = EngineExchange(self.links, self.directory.others, self.engines)

    def _stop_telling(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
