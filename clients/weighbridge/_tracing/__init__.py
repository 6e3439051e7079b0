"""Traces: one of each push, from the trainer over the service to the engines that take the version. Off unless somebody asks for them.

May import: `errors`, and OpenTelemetry's API; its SDK where spans are exported, and nowhere else.

- `traceparent`: what goes from process to process.
- `spans`: spans of this process begun; where tracing is off, OpenTelemetry's own that does nothing.
- `settings`: whether it is on, and by which provider.
- `exporting`: a provider that sends spans to a collector.
"""
