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
from weighbridge.follow.engines import Engine
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.status import drafter_in, is_version, label
from weighbridge.follow.updates import let_go_on

if TYPE_CHECKING:
    from weighbridge import _lazy as lazy

_NAMED = 5
"""Most parameters of a rank that a text names."""


@dataclass(frozen=True, slots=True)
class Proof(JsonValue):
    """Result for an engine.

    Attributes:
        model: ``namespace/name``.
        version: number of the version that it was to serve.
        verdict: ``proved``; ``proved in part`` if parameters could not be compared; ``not proved`` if none could; or ``failed``.
        ranks: the result of each rank, by what errors call it.
        untested: ranks whose parameters came by a recording that was never compared with a load by the engine's own loader.
    """

    model: str
    version: int
    verdict: str
    ranks: Mapping[str, RankProof]
    untested: tuple[str, ...] = ()

    def with_verdict(self, verdict: str) -> Proof:
        """The same with another verdict."""
        return replace(self, verdict=verdict)

    @property
    def wrong_text(self) -> str:
        """Faults, rank by rank; empty if there are none."""
        wanted = label(self.model, self.version)
        found = []
        for name, rank in self.ranks.items():
            if not is_version(rank.served, wanted):
                found.append(f"{name} serves {rank.served or 'no version'}")
            elif rank.wrong:
                found.append(f"{name} has other bytes in {named(rank.wrong, _NAMED)}")
        return "; ".join(found)


def prove(
    client: EngineClient,
    ask: Callable[[Collection[str]], Mapping[str, Evidence]],
    model: str,
    number: int,
    recordings: dict[str, lazy.Recording] | None = None,
) -> Proof:
    """Compare what an engine's ranks compute with with the bytes of a version, which this process pulls itself.

    A drafter that is a model of its own is compared with the version of it that the rank says it has.

    Args:
        client: of the service.
        ask: returns the evidence of all ranks, for the digests of recordings that need not be sent.
        model: ``namespace/name``.
        number: of the version.
        recordings: of ranks, by digest, from proofs before; afterwards those of this one.

    Raises:
        NotFound: no such version.
        FailedPrecondition: a rank has no evidence to give.
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
        raise FailedPrecondition(f"{name} does not say what it takes of a version")
    return lazy.Recording.from_json(evidence.recorded)


def prove_by_load(engine: ByLoad, model: str, number: int) -> Proof:
    """Compare what an engine's ranks compute with with a fresh load of the version by the engine's own loader. The engine stands still meanwhile.

    Unlike `prove` it uses nothing that was recorded of the loader, and compares what the engine makes of weights, too. What differed is
    right afterwards.

    Args:
        engine: its driver.
        model: ``namespace/name``.
        number: of the version that it is to serve.

    Raises:
        WeighbridgeError: it cannot be paused, or a rank cannot load the version.
    """
    try:
        engine.pause()  # one that does not answer in time may have paused
        ranks = engine.compare_with_load()
    finally:
        let_go_on(engine, failed=True)  # a load that failed may have left weights of no version
    return Proof(model, number, _verdict(ranks.values(), label(model, number)), ranks)


@runtime_checkable
class ByLoad(Engine, Protocol):
    """Driver of an engine that can load a version again by its own loader."""

    def compare_with_load(self) -> Mapping[str, RankProof]:
        """Load the version that all ranks have again; what that has changed on each, by what errors call it."""


def _verdict(ranks: Iterable[RankProof], wanted: str) -> str:
    found = list(ranks)
    if any(rank.wrong or not is_version(rank.served, wanted) for rank in found):
        return FAILED
    if not any(rank.compared for rank in found):
        return NOT_PROVED
    return IN_PART if any(rank.unseen for rank in found) else PROVED
