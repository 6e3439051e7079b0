"""Cells of large tables of cases that `make test` leaves to `make test-long`, and what holds the promise in between.

A pytest plugin. Each entry names a test and the cases of it that run: those that cover each value of each axis once, or
the costliest path of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.support.rounds import rounds


@dataclass(frozen=True)
class Cells:
    """The cases of a test, or of all tests of a file, that `make test` runs.

    Attributes:
        test: file and name, from the folder of the tests; or a file alone, of which all cases run but those on S3.
        run: ids of the cases; those that begin with one of these.
        held_by: explanation of what covers the promise where the other cases do not run.
    """

    test: str
    run: tuple[str, ...]
    held_by: str


CELLS = (
    Cells(
        "end_to_end/test_round_trip.py::test_weights_go_to_megatron_and_back_bit_for_bit",
        ("tp1pp2dp2", "tp4pp1dp1"),
        ("no, some and all parallelism of each axis is in one of them; "
        "families/test_round_trip.py has five more layouts of all families"),
    ),
    Cells(
        "service/families/test_round_trip.py::test_weights_go_to_megatron_and_back_bit_for_bit",
        ("tp2ep2etp1-padded", "tp2pp2ep2etp1", "tp2dp2ep2", "pp5-loss"),
        "tensor, data and expert parallelism and padding of all families; stages of all "
        "families are in demo/test_megatron_families_on_cpu.py, "
        "virtual ones in frameworks/test_slime.py",
    ),
    Cells(
        "end_to_end/test_megatron_training_states.py::test_training_goes_on_after_all_ranks_were_killed",
        ("tied over stages, distributed",),
        "the plain optimizer and experts are in sdk/trainers/states/test_megatron_training.py "
        "and test_training_checkpoints.py; a dense model in "
        "the loop of engines/test_megatron_saved_states.py",
    ),
    Cells(
        "sdk/trainers/states/test_sharded_training.py::test_ranks_fill_any_mesh_and_go_on_bit_for_bit_on_their_own",
        ("fsdp4",),
        ("meshes of two axes and replicated ones are filled in "
        "end_to_end/test_torch_trainers.py, and read in converting/test_named_checkpoints.py"),
    ),
    Cells(
        "sdk/trainers/states/test_megatron_training.py::test_ranks_hold_what_megatron_gathers_and_take_it_at_another_parallelism",
        ("distributed, tied over stages", "distributed, experts", "distributed, a key for each layer and half", "plain, experts on the last stage", "plain, tied over stages"),
        "both optimizers, each with experts and with ties; the loops of end_to_end/test_megatron_training_states.py",
    ),
    Cells(
        "end_to_end/test_training_checkpoints.py::test_megatron_loads_what_is_exported_and_what_it_saved_is_restored",
        ("distributed",),
        "the plain optimizer is in sdk/trainers/states/test_megatron_training.py",
    ),
    Cells(
        "engines/test_megatron_saved_states.py::test_a_loop_that_saves_as_megatron_lm_does_goes_on_to_the_bit_from_what_one_line_has_pushed",
        ("distributed",),
        "the plain optimizer is in sdk/trainers/states/test_megatron_training.py",
    ),
    Cells(
        "end_to_end/test_torch_trainers.py::test_a_rank_of_zero_3_takes_memory_for_its_own_ranges_and_not_for_the_model",
        ("local",),
        ("what is copied is decided before the lane; bytes over gRPC are those of "
        "test_what_ranks_share_is_pulled_whole_and_fills_other_meshes_bit_for_bit"),
    ),
    Cells(
        "end_to_end/test_training_checkpoints.py::test_torch_loads_what_is_exported_and_what_it_saved_is_restored",
        ("True",),
        "flat optimizer states; nested ones are those of sdk/trainers/states/test_torch_training.py",
    ),
    Cells(
        "service/catalog/test_store_readers.py::test_no_reader_loses_its_version_whatever_the_clocks_say",
        ("offsets0-1-False", "offsets1-4-False", "offsets2-1-True", "offsets3-4-True"),
        "each pair of clocks, with one visit and with many",
    ),
    Cells(
        "service/replicas/test_replicas.py::test_ranks_spread_over_three_replicas_make_one_version",
        ("local", "s3-columns"),
        "each layout on a folder; what differs on S3 is held by the contract of stores, storage/stores",
    ),
    Cells(
        "service/replicas/test_spread_lanes.py::test_ranks_write_what_their_own_replica_owns_and_stream_the_rest",
        ("local", "s3-columns"),
        "each layout on a folder; what differs on S3 is held by the contract of stores, storage/stores",
    ),
    Cells(
        "demo/test_megatron_families_on_cpu.py::test_logits_of_every_family_equal_those_of_transformers",
        ("Parallel(tp=2, pp=1, dp=2, ep=2", "Parallel(tp=1, pp=2, dp=2, ep=2", "Parallel(tp=1, pp=4"),
        "tensor, pipeline, data and expert parallelism are each in one of them",
    ),
    *(
        Cells(file, (), "the same on a folder; what differs on S3 is held by the contract of stores, storage/stores")
        for file in ("service/replicas/test_replicas.py", "service/catalog/test_retention.py", "end_to_end/test_replica_crashes.py")
    ),
    Cells(
        "project/test_benchmarks.py::test_two_checkouts_are_measured_in_the_same_rounds",
        (),
        "nothing: make test-long runs it, and each use of `make bench ARGS=--against`",
    ),
)  # fmt: skip


def left_out(nodeid: str, cells: Sequence[Cells] = CELLS) -> bool:
    """Whether `make test` leaves a test to `make test-long`."""
    test, _, case = nodeid.partition("[")
    for each in cells:
        if test.endswith(each.test):
            return not case.startswith(each.run) if each.run else True
        if test.partition("::")[0].endswith(each.test) and case.startswith("s3"):
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `CELLS` leaves to `make test-long`, unless a test is named or picked by an option."""
    picked = any("::" in argument for argument in config.args) or config.getoption("keyword")
    if picked or rounds("CELLS"):
        return
    left = [item for item in items if isinstance(item, pytest.Function) and left_out(item.nodeid)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
