"""Options of a push: metadata, golden prompts, holding and failure handling."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from weighbridge._clients.holding.policy import HoldPolicy, OnFailure
from weighbridge._core.engines.golden import GoldenPrompt, GoldenPrompts, golden_of
from weighbridge._core.metadata import Metadata
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb

__all__ = ["PushOptions"]


class PushOptions(TypedDict, total=False):
    """Options of every method that pushes.

    Ranks of a push that give options must give the same ones; the others give none.

    Attributes:
        metadata: strings, finite numbers and booleans that are stored with the version: at most 32 entries and 4 KiB in
            total. Keys have up to 64 letters, digits and ``_ . / -``.
        candidate: hold the version: ``live`` and ``latest`` skip it until it is approved (`Client.approve`).
        allow_nonfinite: do not hold the version if elements are NaN or infinite, as the service does by default.
        golden: at most 16 golden prompts, which agents send to their engines when the engines serve the version; or the
            path of a file from ``weighbridge golden``. They are stored in the metadata, and count towards its 4 KiB.
        max_drift: maximum difference between the log probabilities of an engine and those of the golden prompts; by
            default that of the file, or no limit.
        max_hold_s: seconds for which the call may block the rank in total while it waits for the service, other ranks,
            memory and earlier pushes. The push fails after that. By default each wait has its own timeout
            (`retry_seconds` of the client; 300 s for ranks).
        on_failure: ``raise``, the default; or ``warn``, which logs the reason and returns a handle of the skipped push
            (`PushHandle.skipped`).

    Examples:
        >>> handle = trainer.push_state_dict("acme/smol", model, step=200, metadata={"reward": 0.71}, candidate=True)
        >>> version = handle.wait()
        >>> version.held
        ('candidate',)
        >>> client.refs("acme/smol")["latest"]
        1
    """

    metadata: Metadata
    candidate: bool
    allow_nonfinite: bool
    golden: Sequence[GoldenPrompt] | str | os.PathLike[str] | None
    max_drift: float | None
    max_hold_s: float | None
    on_failure: OnFailure


def check_options(options: Mapping[str, object]) -> None:
    """Refuse unknown options of a push, so that nothing is pushed without the intended options.

    Raises:
        TypeError: an option is unknown, as when a function is called with an unknown keyword.
        InvalidArgument: the value of ``max_hold_s`` or ``on_failure`` is invalid.
    """
    for name in options.keys() - PushOptions.__annotations__.keys():
        raise TypeError(f"a push has no option {name!r}{did_you_mean(name, PushOptions.__annotations__)}")
    HoldPolicy.of(options)


def check_options_of_each(options: Mapping[str, object]) -> None:
    """Refuse options that make sense for one push but not for many.

    Raises the errors of `check_options`, and InvalidArgument.
    """
    check_options(options)
    for name in ("golden", "max_drift"):
        if options.get(name) is not None:
            raise InvalidArgument(
                f"{name} is for one version, and these options are for every push",
                fix="push the version with golden prompts by TrainerClient.push or push_state_dict",
            )


def say(opening: pb.OpenVersionRequest, options: PushOptions) -> None:
    """Put options into a request. Raises InvalidArgument and the errors of `check_options`."""
    check_options(options)
    metadata = options.get("metadata")
    golden = golden_of(options.get("golden"), options.get("max_drift"))
    if golden is not None:
        metadata = {**({} if metadata is None else metadata), **golden.metadata()}
    elif isinstance(metadata, Mapping):
        GoldenPrompts.from_metadata(metadata)  # refuses malformed golden prompts
    opening.candidate = options.get("candidate", False)
    opening.allow_nonfinite = options.get("allow_nonfinite", False)
    for key, value in wire.metadata_to_proto({} if metadata is None else metadata).items():
        opening.metadata[key].CopyFrom(value)
