"""Lazy tensors: the parts of a version that an engine rank needs, found by running the engine's own loader over tensors
without storage.

May import: `_clients` and folders below it.

- `caching`: cache folder of clients.
- `tensor`: tensors without storage.
- `views`: views of them, as strided boxes.
- `joined`: several of them stacked or concatenated.
- `source`: lazy tensors that are fetched while a loader runs.
- `recorder`: observation of a loader's run, or the recording of an earlier process.
- `recording`: the copies of a loader's run.
- `staging`: reserved memory for a version that is not applied yet.
- `arriving`: a version that is staged while it is still being received.
- `early_plan`: rows of bytes for that.
- `pairs`: a version of a policy and one of its drafter, as one.
- `digests`: digests of parameters, present and expected.
- `update`: one pull, straight to the parameters, without the loader.
"""

from weighbridge._lazy.arriving import Arrived, EarlyStaging
from weighbridge._lazy.digests import (
    Digests,
    differing,
    digest_of,
    digests_of,
    expected_digests,
    whole_digests,
)
from weighbridge._lazy.pairs import Pair, prefix_of, prefixed, pull_recorded
from weighbridge._lazy.recorder import Load, is_tested, note_tested, record, remembered
from weighbridge._lazy.recording import Recording, Shape
from weighbridge._lazy.source import Source
from weighbridge._lazy.staging import StagingPlace, on_stream_of, staging_bytes
from weighbridge._lazy.tensor import LazyTensor
from weighbridge._lazy.update import IncomingSlices, Update

__all__ = [
    "Arrived",
    "Digests",
    "EarlyStaging",
    "IncomingSlices",
    "LazyTensor",
    "Load",
    "Pair",
    "Recording",
    "Shape",
    "Source",
    "StagingPlace",
    "Update",
    "differing",
    "digest_of",
    "digests_of",
    "expected_digests",
    "is_tested",
    "note_tested",
    "on_stream_of",
    "prefix_of",
    "prefixed",
    "pull_recorded",
    "record",
    "remembered",
    "staging_bytes",
    "whole_digests",
]
