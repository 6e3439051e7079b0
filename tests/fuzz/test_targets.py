"""Is whatever the parsers read refused as they say, within what it may cost? A short run of each target, always with
the same inputs, and with all that was a finding once.

`make fuzz` goes on from there, with coverage guidance and other inputs.
"""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz.findings import kept
from tests.fuzz.judge import Judge
from tests.fuzz.target import inputs
from tests.fuzz.targets import MODULES, NAMES, find
from tests.support.alone import alone
from tests.support.rounds import rounds

INPUTS = rounds("FUZZ_SAMPLES")
_PROCESS = {*MODULES["services"], *MODULES["models"]}
"""Targets that start a service, or import what makes weight maps."""
_TARGETS = [pytest.param(name, marks=pytest.mark.process if name in _PROCESS else ()) for name in NAMES]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _TARGETS)
@alone
def test_inputs_are_read_or_refused_as_documented(name: str) -> None:
    target = find(name)
    with target.start() as parse:
        judge = Judge(target, parse)
        count = len(target.samples()) + max(int(INPUTS * min(target.weight, 1.0)), 10)
        tried = [*(path.read_bytes() for path in kept(name)), *islice(inputs(target, seed=1), count)]
        found = {data: verdict for data in tried if (verdict := judge.verdict(data)).problem}
    assert not found, "\n".join(f"{data[:200]!r}: {verdict.key}\n{verdict.said}" for data, verdict in found.items())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in _PROCESS])
def test_samples_are_valid(name: str) -> None:
    """A sample that is refused at once would not reach the code behind the check."""
    target = find(name)
    if name in ("names", "hosts", "tokens", "key-sets", "small-documents", "messages", "request-parts"):
        return  # each sample is for one of several parsers, or is refused by design
    with target.start() as parse:
        for sample in target.samples():
            parse(sample)


def test_every_finding_that_is_kept_belongs_to_a_target() -> None:
    from tests.fuzz.findings import FOUND

    assert {path.name for path in FOUND.iterdir() if path.is_dir()} <= set(NAMES)
