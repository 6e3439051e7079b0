"""Are repairs beside services and other repairs safe for every version, with the result of a single repair?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.service.fsck.damaged_stores import LONG, WEIGHTS, fsck, history_of, without_writers
from tests.support.forked import forked_python
from tests.support.services import running_service
from tests.support.small_stores import DURABLE, MODEL, version_folder
from weighbridge import TrainerClient
from weighbridge._core.resources import Retention
from weighbridge_service.fsck.diagnosis import Mend
from weighbridge_service.fsck.repair import check_store
from weighbridge_storage.stores.local import LocalStore


def test_repairs_beside_a_service_that_receives_harm_no_version(folder: Path, template: Path) -> None:
    """The documentation requires stopped services for a repair, but some users will not stop them."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def repair() -> None:
        try:
            while not stop.is_set():
                with closing(LocalStore(folder)) as store:
                    for model in check_store(store, repair=True, drop_damaged=True):
                        assert {c.finding.mend for c in model.findings} <= {Mend.STRAY}, model
        except BaseException as error:
            failures.append(error)

    repairs = [threading.Thread(target=repair) for _ in range(2)]
    pushed: list[int] = []
    with running_service(folder, collect_every=0.2) as running, TrainerClient(running.address) as trainer:
        trainer.set_retention(MODEL, Retention(keep_last=4))
        for thread in repairs:
            thread.start()
        try:
            for step in range(12):
                source = version_folder(template, DURABLE[step % len(DURABLE)])
                handle = trainer.push_folder(MODEL, source, step=step)
                pushed.append(handle.wait(timeout=60).number)
        finally:
            stop.set()
            for thread in repairs:
                thread.join()
        there = [version.number for version in trainer.versions(MODEL)]
        assert not failures
        assert set(pushed[-4:]) <= set(there)
        assert not [problem for number in there for problem in trainer.verify(MODEL, number).problems]
    assert fsck(folder)[0] == 0


@pytest.mark.usefixtures("long")
def test_two_repairs_at_once_do_what_one_does(folder: Path, opened: LocalStore) -> None:
    before = without_writers(history_of(opened, LONG))
    (folder / LONG.head_key).unlink()
    for number in range(1, 151, 7):
        (version_folder(folder, number, str(LONG)) / f"{WEIGHTS}.blake3").unlink()
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda _: run_fsck(folder), range(2)))
    assert 0 in codes
    assert fsck(folder)[0] == 0
    assert without_writers(history_of(opened, LONG)) == before


def run_fsck(folder: Path) -> int:
    """The exit code of a repair by a process of its own."""
    log = folder.parent / f"repair-{threading.get_ident()}.log"
    with log.open("w") as errors:
        command = ("-m", "weighbridge", "fsck", str(folder), "--repair")
        with forked_python(*command, stderr=errors.fileno()) as process:
            process.stdout.read()
            code = process.wait(120)
    assert "Traceback" not in log.read_text()
    return code
