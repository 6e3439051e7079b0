"""Rounds of the tests that draw at random or inject faults: a few in `make test`, many in `make test-long`.

An environment variable sets another count. docs/testing.md lists the same counts, and a test compares it with this
table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """A count of rounds.

    Attributes:
        variable: the environment variable that sets it, without ``WEIGHBRIDGE_``.
        usual: the count in `make test`.
        long: the count in `make test-long`.
        tests: the arguments of pytest that select the tests.
        unit: one round, in words.
    """

    variable: str
    usual: int
    long: int
    tests: str
    unit: str


ROUNDS = (
    Rounds("CRASHES", 1, 50, "tests/end_to_end/test_crash.py", "the service is killed"),
    Rounds("STATE_KILLS", 1, 100, "tests/end_to_end/test_training_state_crashes.py", "the service, or ranks that push training states, are killed"),
    Rounds("ADAPTER_KILLS", 20, 200, "tests/end_to_end/test_adapter_crashes.py", "the service, or ranks that push adapters to several names, are killed"),
    Rounds("REPLICA_CRASHES", 1, 25, "tests/end_to_end/test_replica_crashes.py", "one of several replicas is killed in the middle of a push"),
    Rounds("S3_CRASHES", 1, 25, "tests/end_to_end/test_s3_crashes.py", "the service, or the object store under it, is killed"),
    Rounds("CONVERT_KILLS", 1, 50, "tests/service/converting", "a conversion is killed"),
    Rounds("WRITER_FAULTS", 2, 1000, "tests/end_to_end/test_writer_faults.py", "a writer is stopped, killed, forked or closed in the middle of its copy"),
    Rounds("SERVICE_FAULTS", 1, 500, "tests/end_to_end/test_service_faults.py", "two replicas run on a bad way to their store"),
    Rounds("S3_FAULTS", 1, 500, "tests/storage/stores/test_s3_faults.py", "a store runs on broken S3 requests"),
    Rounds("STORE_STOP_SECONDS", 4, 300, "tests/end_to_end/test_store_stopped.py", "a second in which the object store does not answer"),
    Rounds("STORE_RUNS", 2, 2000, "tests/service/fsck/test_fuzzing.py", "a spoilt store is repaired"),
    Rounds("SESSION_RUNS", 30, 10_000, "tests/service/push/test_orders_of_events.py", "a random order of events"),
    Rounds("ADMISSIONS", 5, 1000, "tests/storage/memory/test_image_decisions.py", "a random order of requests for memory"),
    Rounds("PIN_RUNS", 8, 300, "tests/storage/head/test_pins.py", "a random interleaving of pushes of adapters with collections and deletions of their base"),
    Rounds("LANE_RUNS", 2, 500, "tests/sdk/lane/test_local_lane.py", "a push and some pulls by the local lane"),
    Rounds("RANKS", 48, 512, "tests/service/api/grpc/test_many_ranks.py", "a rank of one push"),
    Rounds("HISTORY_VERSIONS", 600, 20_000, "tests/storage/head/test_history.py", "a version in a model's history"),
    Rounds("BLOB_MB", 2, 1024, "tests/end_to_end/test_training_states.py -k values_of_any", "a MiB of a value in each of two ranks' training states; takes 12 times as much memory"),
    Rounds("PLANS", 400, 40_000, "tests/sdk/memory/test_native_copies.py", "a random plan of copies under sanitizers"),
    Rounds("BOXES", 10_000, 100_000, "tests/service/models/test_engine_pulls.py", "a box of one pull"),
    Rounds("PULL_SECONDS", 2, 60, "tests/end_to_end/test_idempotence.py", "a second in which eight engines pull while versions come"),
    Rounds("CELLS", 0, 1, "tests/end_to_end tests/sdk/formats tests/service tests/project", "1: all cases of the large tables in tests/support/cells.py"),
    Rounds("EXAMPLES", 50, 1000, "tests -m hypothesis", "an example of each property"),
    Rounds("SIEGES", 1, 9, "tests/project/test_siege.py", "an attack of `make bench-siege`"),
    Rounds("EARLY_ROUNDS", 4, 50, "tests/engines/test_early_staging.py", "a push whose rank dies and writes other bytes while an engine stages it"),
    Rounds("PROOF_FAULTS", 20, 1000, "tests/engines/test_proofs.py", "a fault that is put into an engine whose parameters are proved"),
    Rounds("ENGINE_FAULTS", 8, 1000, "tests/engines/test_engine_faults.py", ("a fault that is put into a live vLLM whose parameters are proved, and a proof without "
                                                                            "one; with an eighth as many stale "
                                                                            "caches, and engines that an update skips")),
    Rounds("ENGINE_KILLS", 1, 15, "tests/engines/test_engine_kills.py", ("a rank of an engine, its agent, the service or the trainer is killed, in each phase of "
                                                                        "an update")),
    Rounds("SERVED_ADAPTERS", 3, 50, "tests/engines/test_vllm_adapters.py", "an adapter that a live vLLM serves"),
    Rounds("SERVED_VERSIONS", 3, 20, "tests/engines/test_vllm_adapters.py", "a version of each of these, pushed while clients ask"),
    Rounds("SERVED_CLIENTS", 4, 20, "tests/engines/test_vllm_adapters.py", "a client that asks meanwhile"),
    Rounds("FUZZ_SAMPLES", 100, 300, "tests/fuzz/test_targets.py", "an input of each parser, without coverage guidance"),
    Rounds("FUZZ_CALLS", 60, 20_000, "tests/service/api/grpc/test_fuzzing.py", "a call over the network"),
    Rounds("FUZZ_REQUESTS", 60, 20_000, "tests/service/api/http/test_fuzzing.py", "a request over the network"),
)  # fmt: skip
_BY_VARIABLE = {each.variable: each for each in ROUNDS}


def rounds(variable: str) -> int:
    """The count of rounds in this run."""
    return int(os.environ.get(f"WEIGHBRIDGE_{variable}") or _BY_VARIABLE[variable].usual)


def first_seed() -> int:
    """The seed of random numbers: the same in each `make test`, another in each `make test-long`, which prints it."""
    return int(os.environ.get("WEIGHBRIDGE_SEED") or 1)
