"""Workers of vLLM that say what their parameters are, and wait at phases of an update: for `benchmarks.pause_kills`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pause_kills import APPLY, READY, STAGE
from benchmarks.pause_models import checksum
from weighbridge._lazy import EarlyStaging
from weighbridge.integrations.engine_rank.preparation import Preparation
from weighbridge.integrations.vllm.worker import WorkerExtension

_LOOK_SECONDS = 0.005


class Checked(WorkerExtension):
    """Methods of every worker, besides those that the agent calls."""

    def bench_facts(self) -> dict[str, Any]:
        """Process of this worker, and the checksum of each parameter."""
        parameters = self.model_runner.model.named_parameters()
        sums = {name.replace(".routed_experts", ""): checksum(p) for name, p in parameters}
        return {"pid": os.getpid(), "sums": sums}

    def bench_hold(self, phase: str, folder: str) -> int:
        """Make this worker wait when it comes to a phase: it creates the file ``held`` then, and goes on once there is
        a file ``go``.
        """
        _Holds.install(self.weight_transfer_engine.rank.engine)
        _Holds.phase, _Holds.folder = phase, Path(folder)
        return os.getpid()


class _Holds:
    phase = ""
    folder = Path()
    _fill: Callable[..., Any] | None = None

    @classmethod
    def at(cls, phase: str) -> None:
        """Come to a phase."""
        if phase != cls.phase:
            return
        cls.phase = ""
        (cls.folder / "held").touch()
        while not (cls.folder / "go").exists():
            time.sleep(_LOOK_SECONDS)

    @classmethod
    def install(cls, engine: Any) -> None:
        """Have the code of updates come to phases."""
        if cls._fill is not None:
            return
        note, take, fill = Preparation._note, EarlyStaging.take, engine.fill
        cls._fill = fill

        def noted(self: Preparation, what: str) -> None:
            note(self, what)
            # one that came at once is ready when it is planned; nothing is staged early of it, or where there is no
            # place
            if what in ("ready", "planned"):
                cls.at(READY)
            if what == "brought" or (what == "borrowed" and engine.place is None):
                cls.at(STAGE)

        def taken(self: EarlyStaging) -> bool:
            found = take(self)
            if found:
                cls.at(STAGE)
            return found

        def filled(*arguments: Any) -> None:
            fill(*arguments)
            cls.at(APPLY)

        Preparation._note, EarlyStaging.take = noted, taken  # type: ignore[method-assign]
        engine.fill = filled
