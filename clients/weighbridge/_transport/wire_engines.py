"""Engines as protobuf messages and back. Texts and numbers are not checked here: the service checks reports."""

from __future__ import annotations

from dataclasses import fields

from weighbridge._core.engines.facts import Engine, EngineFacts
from weighbridge._core.engines.step_parts import chosen
from weighbridge.v1 import engine_service_pb2 as pb

_FACTS = [field.name for field in fields(EngineFacts)]
_KNOWN = [field.name for field in fields(Engine) if field.name not in _FACTS]


def engine_to_proto(engine: Engine) -> pb.Engine:
    """An engine as a message."""
    report = pb.EngineReport(**{name: getattr(engine, name) for name in _FACTS})
    return pb.Engine(report=report, **{name: getattr(engine, name) for name in _KNOWN})


def engine_from_proto(message: pb.Engine) -> Engine:
    """A message as an engine."""
    facts = {name: getattr(message.report, name) for name in _FACTS}
    parts = dict(message.report.update_parts)
    return Engine(
        **{**facts, "update_parts": {**chosen(parts), **parts}},  # a map of a message has no order
        **{name: getattr(message, name) for name in _KNOWN},
    )
