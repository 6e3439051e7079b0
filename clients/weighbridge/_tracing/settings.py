"""Settings of tracing: whether it is on in this process, and where its spans are sent.

It is on where the application has set up OpenTelemetry, whose provider is used then; where the environment names a
collector, by ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_TRACES_EXPORTER``; and
after `enable`. OpenTelemetry itself reads its other variables (samplers, resources, limits, certificates).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping

from opentelemetry import trace

from weighbridge._tracing.exporting import ENDPOINTS, exporting
from weighbridge._version import VERSION
from weighbridge.errors import FailedPrecondition

log = logging.getLogger(__name__)

_NONE = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
"""Providers of an application that has not set up OpenTelemetry."""


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment enables the export of spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporters:
        return exporters != "none"
    return any(environment.get(name) for name in ENDPOINTS)


def _of_application() -> trace.TracerProvider | None:
    """The provider that the application has set up; None if it has set up none."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        # get_tracer_provider would load the provider of OTEL_PYTHON_TRACER_PROVIDER, maybe not installed, for the whole
        # process
        return None
    found = trace.get_tracer_provider()
    return None if isinstance(found, _NONE) else found


class TracingState:
    """State of tracing in this process. Thread-safe.

    Args:
        own: provider to use whatever the application and the environment set.

    Attributes:
        service: name of this process in traces, unless the environment has another one.
    """

    def __init__(self, own: trace.TracerProvider | None = None) -> None:
        self.service = "weighbridge-client"
        self._lock = threading.Lock()
        self._own = own
        self._asked = own is not None
        self._tracer: trace.Tracer | None = None

    @property
    def provider(self) -> trace.TracerProvider | None:
        """Provider of tracers of this process; None where tracing is off."""
        if not self._asked:
            self._ask_environment()
        return self._own or _of_application()

    def tracer(self) -> trace.Tracer | None:
        """Tracer of this process; None where tracing is off."""
        provider = self.provider
        if provider is not None and self._tracer is None:
            self._tracer = provider.get_tracer("weighbridge", VERSION)
        return self._tracer

    def enable(self, endpoint: str = "") -> None:
        """Send spans of this process to a collector. Does nothing if they are sent already.

        Args:
            endpoint: the collector's OTLP address; empty for that of the environment.

        Raises:
            FailedPrecondition: the packages of the extra ``tracing`` are not installed.
            InvalidArgument: that is no address, or there is no such protocol.
        """
        with self._lock:
            if self._own is not None:
                return
            try:
                self._own, self._tracer = exporting(self.service, endpoint), None
            except ImportError as error:
                raise FailedPrecondition(
                    f"traces need {error.name}, which is not installed",
                    fix="pip install 'weighbridge[tracing]'",
                ) from error

    def _ask_environment(self) -> None:
        self._asked = True
        if _of_application() is None and wanted(os.environ):
            try:
                self.enable()
            except Exception as error:  # of any kind: tracing must not make a push fail
                log.warning("traces are disabled: %s", error)


OF_PROCESS = TracingState()
