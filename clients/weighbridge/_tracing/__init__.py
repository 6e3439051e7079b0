"""Traces: one of each push, from the trainer over the service to the engines that take the version. Off unless somebody asks for them.

May import: `errors`. OpenTelemetry is imported where tracing is on, and nowhere else.

- `traceparent`: what goes from process to process.
- `spans`: spans of this process begun; nothing, at no cost, where tracing is off.
- `span`: what one is, and does nothing.
- `opentelemetry`: those that do.
- `http_parents`: what of HTTP's headers counts.
- `variables`: which of OpenTelemetry's are read here.
- `settings`: whether it is on, and where spans are sent.
"""
