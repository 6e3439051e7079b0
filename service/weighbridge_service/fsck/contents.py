"""Comparison of the contents of stored versions with their digests, model by model, without a service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weighbridge._core.resources import Verification
from weighbridge.errors import Unavailable, WeighbridgeError
from weighbridge_service.fsck.repair import CheckedModel
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.verifying import verify_version


@dataclass(frozen=True)
class ComparedVersion:
    """Result of the comparison of one version.

    Attributes:
        number: number of the version.
        nbytes: bytes that were read; 0 if the version was compared before.
        problems: one line for each file or tensor that differs.
    """

    number: int
    nbytes: int
    problems: tuple[str, ...]


def compare_contents(
    store: ObjectStore,
    model: CheckedModel,
    was_compared: Callable[[int], bool],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[ComparedVersion]:
    """Read all files of a model's versions, and compare them with their manifests.

    Args:
        store: store of the model.
        model: result of the model's check; versions that are not whole are skipped.
        was_compared: returns whether a version was compared before and need not be read again.
        on_progress: called with the number of compared bytes, and their total.

    Raises:
        Unavailable: the store cannot be reached.
    """
    name = ModelName.parse(model.name)
    total, done = sum(model.whole.values()), 0
    for number, nbytes in sorted(model.whole.items()):
        if was_compared(number):
            done += nbytes
            yield ComparedVersion(number, 0, ())
            continue
        before = done

        def took(read: int, before: int = before) -> None:
            on_progress(before + read, total)

        found = _verified(store, name, number, took)
        done += nbytes
        on_progress(done, total)
        yield ComparedVersion(number, found.bytes_checked, found.problems)


def _verified(store: ObjectStore, model: ModelName, number: int, on_progress: Callable[[int], None]) -> Verification:
    try:
        return verify_version(store, model, number, on_progress=on_progress)
    except Unavailable:
        raise
    except WeighbridgeError as error:  # the manifest cannot be read
        return Verification(number, 0, 0, (error.message,), 0, {})
