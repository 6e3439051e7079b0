"""Orders of events: does a push keep its promises in every one, with faults, and come to an end?

``WEIGHBRIDGE_SESSION_RUNS=10000`` makes as many runs; ``WEIGHBRIDGE_SEED`` chooses the first one's seed.
"""

from __future__ import annotations

import pytest

from tests.service.push.simulated_push import STEPS, World, settled_in_all_ways
from tests.support.rounds import first_seed, rounds
from weighbridge_service.push.machine.phases import Phase

RUNS = rounds("SESSION_RUNS")
FIRST_SEED = first_seed()
BATCHES = 10
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_order_of_events_keeps_all_promises_and_comes_to_an_end(batch: int) -> None:
    seen: set[Phase] = set()
    for seed in range(FIRST_SEED + batch, FIRST_SEED + RUNS, BATCHES):
        world = World(seed)
        world.open()
        looks = {world.dice.randrange(STEPS) for _ in range(2)}
        try:
            for turn in range(STEPS):
                world.act()
                seen.update(p.state.phase for r in world.replicas for p in r.parts)
                if turn in looks:
                    settled_in_all_ways(world)
            world.settle(store_away=False)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    if RUNS >= 30 * BATCHES:
        assert seen >= set(Phase) - {Phase.HANDED_OVER}, "a run that does not come this far shows nothing"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_version_that_is_ready_outlives_replicas_that_leave_in_every_order_of_events(batch: int) -> None:
    """Replicas leave when the version is ready, be it that ranks have pushed to one or to each; those that take it over
    may leave, too.
    """
    seen: set[Phase] = set()
    calm, shares = 0, 0
    for seed in range(FIRST_SEED + batch, FIRST_SEED + RUNS, BATCHES):
        world = World(seed)
        if len(world.replicas) == 1:
            continue
        if seed // BATCHES % 2:  # nothing goes wrong but that replicas leave
            world.fault_rate = world.unrest = 0.0
            world.pauses.remove(60.0)  # long enough for a lease to end while its renewal is not answered
        try:
            if seed // BATCHES % 4 < 2:
                world.make_ready()
            else:
                world.make_ready_at_all()
            for turn in range(60):
                world.act_when_ready()
                seen.update(p.state.phase for r in world.replicas for p in r.parts)
                if turn == 30:
                    settled_in_all_ways(world)
            without_faults = not world.fault_rate and not world.unrest and 60.0 not in world.pauses
            world.settle(store_away=False)
            if without_faults:
                assert world.published, "lost although nothing went wrong"
                calm += bool(world.taken_over)
                shares += any(r.taken for r in world.replicas)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    if RUNS >= 30 * BATCHES:
        assert Phase.HANDED_OVER in seen, "a run that does not come this far shows nothing"
        assert calm
        assert shares
