"""Proof that an engine computes with the bytes of a version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weighbridge._clients.engine import EngineClient
from weighbridge._core.engines.facts import FAILED, IN_PART, NOT_PROVED, PROVED
from weighbridge._core.json_values import JsonValue
from weighbridge._core.text.counts import named
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import EngineDriver
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.status import drafter_in, is_version, label
from weighbridge.follow.updates import let_go_on

if TYPE_CHECKING:
    from weighbridge import _lazy as lazy

_NAMED = 5
"""Maximum number of a rank's parameters that a message names."""


@dataclass(frozen=True, slots=True)
class Proof(JsonValue):
    """Result for an engine.

    Attributes:
        model: ``namespace/name``.
        version: number of the version that it should serve.
        verdict: ``proved``; ``proved in part`` if parameters could not be compared; ``not proved`` if none could; or
            ``failed``.
        ranks: the result of each rank, by the rank's name in errors.
        untested: ranks whose parameters were placed by a recording that was never compared with a load by the engine's
            own loader.
    """

    model: str
    version: int
    verdict: str
    ranks: Mapping[str, RankProof]
    untested: tuple[str, ...] = ()

    def with_verdict(self, verdict: str) -> Proof:
        """This proof with a different verdict."""
        return replace(self, verdict=verdict)

    @property
    def wrong_text(self) -> str:
        """Mismatches, rank by rank; empty if there are none."""
        wanted = label(self.model, self.version)
        found = []
        for name, rank in self.ranks.items():
            if not is_version(rank.served, wanted):
                found.append(f"{name} serves {rank.served or 'no version'}")
            elif rank.wrong:
                found.append(f"{name} has different bytes in {named(rank.wrong, _NAMED)}")
        return "; ".join(found)


def prove(
    client: EngineClient,
    ask: Callable[[Collection[str]], Mapping[str, Evidence]],
    model: str,
    number: int,
    recordings: dict[str, lazy.Recording] | None = None,
) -> Proof:
    """Compare the parameters of an engine's ranks with the bytes of a version, which this process pulls itself.

    A drafter that is a separate model is compared with the drafter's version that the rank reports.

    Args:
        client: of the service.
        ask: returns the evidence of all ranks; its argument is the digests of recordings that need not be sent.
        model: ``namespace/name``.
        number: number of the version.
        recordings: recordings of ranks, by digest, from earlier proofs; updated to those of this proof.

    Raises:
        NotFound: the version does not exist.
        FailedPrecondition: a rank cannot provide evidence.
    """
    from weighbridge import _lazy as lazy

    known = {} if recordings is None else recordings
    expected: dict[tuple[str, str], lazy.Digests] = {}
    ranks: dict[str, RankProof] = {}
    evidences = ask(known.keys())
    used = {each.recording: _recording(name, each, known) for name, each in evidences.items()}
    known.clear()
    known.update(used)
    for name, evidence in evidences.items():
        draft = drafter_in(evidence.served)
        if (taken := (evidence.recording, draft)) not in expected:
            recording = used[evidence.recording]
            pull = lazy.pull_recorded(client, recording, model, number, draft)
            expected[taken] = lazy.expected_digests(recording, (tensor for _, tensor in pull))
        wrong = lazy.differing(expected[taken], evidence.digests)
        ranks[name] = RankProof(
            evidence.served, len(evidence.digests), tuple(wrong), dict(evidence.unseen), evidence.seconds
        )
    untested = tuple(name for name, evidence in evidences.items() if evidence.untested)
    return Proof(model, number, _verdict(ranks.values(), label(model, number)), ranks, untested)


def _recording(name: str, evidence: Evidence, known: Mapping[str, lazy.Recording]) -> lazy.Recording:
    from weighbridge import _lazy as lazy

    if evidence.recording in known:
        return known[evidence.recording]
    if not evidence.recorded:
        raise FailedPrecondition(f"{name} does not report which parts of a version it uses")
    return lazy.Recording.from_json(evidence.recorded)


def prove_by_load(engine: ByLoad, model: str, number: int) -> Proof:
    """Compare the parameters of an engine's ranks with a fresh load of the version by the engine's own loader.

    The engine is paused meanwhile.

    Unlike `prove`, this does not use the recording of the loader, and it also compares tensors that the engine derives
    from weights. Afterwards the engine has the values of the fresh load.

    Args:
        engine: its driver.
        model: ``namespace/name``.
        number: number of the version that it should serve.

    Raises:
        WeighbridgeError: the engine cannot be paused, or a rank cannot load the version.
    """
    try:
        engine.pause()  # an engine that does not respond in time may have paused
        ranks = engine.compare_with_load()
    finally:
        let_go_on(engine, failed=True)  # a failed load may have left weights that belong to no version
    return Proof(model, number, _verdict(ranks.values(), label(model, number)), ranks)


@runtime_checkable
class ByLoad(EngineDriver, Protocol):
    """Driver of an engine that can load a version again with its own loader."""

    def compare_with_load(self) -> Mapping[str, RankProof]:
        """Load the version of all ranks again. Returns the changes on each rank, by the rank's name in errors."""


def _verdict(ranks: Iterable[RankProof], wanted: str) -> str:
    found = list(ranks)
    if any(rank.wrong or not is_version(rank.served, wanted) for rank in found):
        return FAILED
    if not any(rank.compared for rank in found):
        return NOT_PROVED
    return IN_PART if any(rank.unseen for rank in found) else PROVED
