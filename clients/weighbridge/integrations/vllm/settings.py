"""Settings for the source of weights, from vLLM's option ``--model-loader-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from weighbridge._core.references import parse_reference
from weighbridge._core.resources import REF_LATEST
from weighbridge.errors import InvalidArgument
from weighbridge.follow.engines import REFUSE, stale_drafter_of
from weighbridge.integrations.engine_rank.source import ModelSource


@dataclass(frozen=True)
class Settings(ModelSource):
    """A version of a model at a service.

    Attributes:
        version: a number or a ref.
        card_share: fraction of the weights, from 0 to 1, for which GPU memory is reserved at the start, so that new
            versions are staged on the GPU before the engine is paused; None for all of them if that leaves half of the
            GPU memory, otherwise for none.
        stale_drafter: policy for updates that leave the drafter of speculative decoding behind: ``refuse`` or
            ``allow``.
        draft: model of the service that the drafter of speculative decoding is loaded from, such as
            ``acme/smol-eagle``, or a ref or version of it, such as ``acme/smol-eagle@5``; empty for a drafter from
            another source.
    """

    version: str = "latest"
    card_share: float | None = None
    stale_drafter: str = REFUSE
    draft: str = ""

    @staticmethod
    def of(given: Mapping[str, Any], model: str) -> Settings:
        """The settings in an extra config, for the given model if they do not name one.

        Raises InvalidArgument as `ModelSource.read`.
        """
        said = {"model": model, **given}
        if type(said.get("version")) is int:
            said["version"] = str(said["version"])
        found = Settings.read(said, "the extra config of load format weighbridge")
        if found.card_share is not None and not 0 <= found.card_share <= 1:
            raise InvalidArgument(f"card_share of load format weighbridge is {found.card_share}, not between 0 and 1")
        stale_drafter_of(found.stale_drafter)
        return found

    @property
    def source(self) -> ModelSource:
        """The source: these settings without the version."""
        return ModelSource(self.model, self.server, self.lane, self.retry_seconds)

    @property
    def of_drafter(self) -> Settings:
        """Settings for loading the drafter."""
        named = parse_reference(self.draft, need_version=False)
        return replace(self, model=named.model, version=named.version or REF_LATEST, draft="")

    def write(self) -> dict[str, Any]:
        """These settings as an extra config that `of` can parse."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def source_for(
    known: ModelSource | None, model: str | None, server: str | None, lane: str | None
) -> ModelSource | None:
    """Source of versions: the known one, with its values overridden by the arguments; None if no model is known."""
    if model is not None and (known is None or known.model != model):
        known = ModelSource(model)
    return known and replace(known, server=server or known.server, lane=lane or known.lane)
