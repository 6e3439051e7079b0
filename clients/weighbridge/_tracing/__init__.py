"""Traces: one of each push, from the trainer through the service to the engines that pull the version. Off by default.

May import: `errors`, and OpenTelemetry's API; its SDK where spans are exported, and nowhere else.

- `traceparent`: the header that carries a trace between processes.
- `spans`: spans of this process; where tracing is off, OpenTelemetry's no-op span.
- `settings`: whether tracing is on, and its provider.
- `exporting`: a provider that sends spans to a collector.
"""
