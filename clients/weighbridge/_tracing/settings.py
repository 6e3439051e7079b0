"""Settings of tracing: whether it is on in this process, and where its spans are sent.

It is on where the application has set up OpenTelemetry, whose provider is used then; where the environment says to which collector spans go, by
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_TRACES_EXPORTER``; and after `enable`. OpenTelemetry's other
variables (samplers, resources, limits, certificates) are read by OpenTelemetry itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping

from weighbridge._tracing.span import Tracing
from weighbridge._tracing.variables import ENDPOINTS
from weighbridge.errors import FailedPrecondition

log = logging.getLogger(__name__)

_FIX = "pip install 'weighbridge[tracing]'"


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment says where spans go."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporters:
        return exporters != "none"
    return any(environment.get(name) for name in ENDPOINTS)


class Settings:
    """Whether tracing is on in this process. Thread-safe.

    Attributes:
        service: name of this process in traces, unless the environment has another one.
    """

    def __init__(self) -> None:
        self.service = "weighbridge-client"
        self._lock = threading.Lock()
        self._on: Tracing | None = None
        self._asked = False

    def tracing(self) -> Tracing | None:
        """What makes spans; None where tracing is off, at the cost of two look-ups."""
        if self._on is None:
            if not self._asked:
                self._ask_environment()
            # an application that has imported it may set it up at any time
            elif "opentelemetry.sdk.trace" in sys.modules:
                self._use_applications()
        return self._on

    def enable(self, endpoint: str = "") -> None:
        """Send spans of this process to a collector. Nothing happens if they are sent already.

        Args:
            endpoint: the collector's OTLP address; empty for what the environment says.

        Raises:
            FailedPrecondition: the packages of the extra ``tracing`` are not installed.
            InvalidArgument: that is no address, or there is no such protocol.
        """
        with self._lock:
            if self._on is not None:
                return
            try:
                from weighbridge._tracing.opentelemetry import exporting
            except ImportError as error:
                raise FailedPrecondition(
                    f"traces need {error.name}, which is not installed", fix=_FIX
                ) from error
            self._on = exporting(self.service, endpoint)

    def _ask_environment(self) -> None:
        if "opentelemetry.sdk.trace" in sys.modules:
            self._use_applications()
        self._asked = True
        if self._on is None and wanted(os.environ):
            try:
                self.enable()
            except Exception as error:  # whichever: no push fails for want of a trace
                log.warning("there will be no traces: %s", error)

    def _use_applications(self) -> None:
        from weighbridge._tracing.opentelemetry import of_application

        with self._lock:
            self._on = self._on or of_application()


OF_PROCESS = Settings()
