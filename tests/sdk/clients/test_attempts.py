"""Is a version tried again as long as a ref names it, and not for ever?"""

from __future__ import annotations

from pathlib import Path

from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge._clients.attempts import TRIES, attempts, named

MODEL = "acme/tiny"


def test_attempts_end_when_the_ref_moves_and_are_few_while_it_does_not(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.import_folder(MODEL, source.folder).wait(timeout=60)
        assert len(list(attempts(trainer, MODEL, "live", 1, 0.01))) == TRIES

        tried = attempts(trainer, MODEL, "live", 1, 0.01)
        next(tried)
        next(tried)
        trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        assert list(tried) == []


def test_a_service_that_is_away_ends_no_attempts(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    with running_service(tmp_path / "store") as service:
        address = service.address
        with TrainerClient(address) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
    with TrainerClient(address, retry_seconds=0.1) as trainer:
        assert named(trainer, MODEL, "live") is None
        assert len(list(attempts(trainer, MODEL, "live", 1, 0.01))) == TRIES
