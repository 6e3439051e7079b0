"""Preparation of a version: recording of its loader, checks, and the fetch of its bytes to host memory in a separate
thread while the engine serves.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient, read_arriving
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, WeighbridgeError
from weighbridge.follow.engines import attempt
from weighbridge.integrations.engine_rank.fitting import check_config, check_tensors
from weighbridge.integrations.engine_rank.model import EngineModel, Rest
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.engine_rank.turns import short_turns

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Pause between two checks whether a version that is not ready is still needed."""
_LEAST_PAUSE, _MOST_PAUSE = 0.0005, 0.02
"""Seconds between two checks for arrived data."""


@dataclass(frozen=True)
class Recorded:
    """Recording of the slices that a rank needs of any version of a model.

    Attributes:
        model: ``namespace/name``.
        specs: the tensors of its versions.
        configuration: the engine's configuration when its loader was recorded.
        recording: recording of the loader.
        draft: model of a drafter whose versions accompany them; empty if there is none.
        draft_specs: the tensors of the drafter's versions.
    """

    model: str
    specs: tuple[TensorSpec, ...]
    configuration: str
    recording: lazy.Recording
    draft: str = ""
    draft_specs: tuple[TensorSpec, ...] = ()

    @staticmethod
    def of(found: lazy.Source, configuration: str, recording: lazy.Recording) -> Recorded:
        """Create a record from a version and its recording."""
        if not isinstance(found, lazy.Pair):
            return Recorded(found.version.model, found.specs, configuration, recording)
        mine = found.drafter
        return Recorded(found.version.model, found.specs, configuration, recording, mine.version.model, mine.specs)

    def is_of(self, source: ModelSource, configuration: str) -> bool:
        """Whether this recording applies to versions of a source."""
        asked = source.model, source.draft.rpartition("@")[0], configuration
        return (self.model, self.draft, self.configuration) == asked

    def check(self, found: lazy.Source) -> None:
        """Refuse a version whose tensors, or whose drafter's tensors, differ from those of earlier versions.

        Raises:
            FailedPrecondition: names tensors that are missing, too many or of another shape.
        """
        check_tensors(self.specs, found.specs, found.version)
        if isinstance(found, lazy.Pair) and found.drafter.version.model == self.draft:
            check_tensors(self.draft_specs, found.drafter.specs, found.drafter.version)

    def has_dtypes_of(self, found: lazy.Source) -> bool:
        """Whether a version that passed `check` also has the recorded dtypes."""
        mine = found.drafter.specs if isinstance(found, lazy.Pair) else ()
        return (found.specs, mine) == (self.specs, self.draft_specs)

    @cached_property
    def tensors_digest(self) -> str:
        """Digest of the tensors, in the form that `ArrivalMarks` contains for a version."""
        return Layout.stream(self.specs, ()).digest


def check_model(config: Any, client: EngineClient, version: Version) -> None:
    """Refuse a version that belongs to a different model than the engine's.

    Args:
        config: the Hugging Face configuration of the engine's model; None skips the comparison.
        client: of the service.
        version: the version.

    Raises:
        FailedPrecondition: states what differs, or that the version is an adapter.
    """
    version.check_whole()
    if config is not None:
        theirs = client.model_files(version.model, version.number).get("config.json")
        if theirs is not None:
            check_config(config, theirs, version)


class RecordingStale(FailedPrecondition):
    """The dtypes of a version differ from the recorded ones; the next preparation records the loader again."""


class Preparation:
    """A version that is being fetched to this rank's host memory.

    Attributes:
        source: where it comes from.
        number: number of the version.
        recorded: the slices that are fetched.
        nbytes: bytes to fetch.
        seconds: duration, once it has ended.
        error: why it failed; None if it did not fail or has not ended.
        rest: tensors for which the model's own loader must run.
        asked: whether an agent requested it. Until then, a preparation that began early yields to another version.
        early_seconds: how long before the request it began.

    Args:
        engine: the model.
        client: of the service.
        source, number, recorded: as the attributes.
        early: whether the version is still being received.
    """

    def __init__(
        self,
        engine: EngineModel,
        client: EngineClient,
        source: ModelSource,
        number: int,
        recorded: Recorded,
        *,
        early: bool = False,
    ) -> None:
        self.asked = not early
        self.early_seconds = 0.0
        self._early = early
        self.source = source
        self.number = number
        self.recorded = recorded
        whole = [spec for spec in recorded.specs if spec.name in recorded.recording.unrecorded]
        self.nbytes = recorded.recording.nbytes + sum(spec.nbytes for spec in whole)
        self.seconds = 0.0
        self.error: WeighbridgeError | None = None
        self.rest: Rest = []
        self._update: lazy.Update | None = None
        self._unwanted = threading.Event()
        self._ready: Version | None = None
        self._begun = time.monotonic()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's own
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(engine, client), name=f"prepare {self.label}", daemon=True
        )
        self._thread.start()

    @property
    def label(self) -> str:
        """The name of the version."""
        return self.source.label(self.number)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.done()

    @property
    def update(self) -> lazy.Update:
        """The bytes, and their destinations.

        Raises:
            FailedPrecondition: the bytes have not arrived.
        """
        if self._update is None:
            raise FailedPrecondition(f"{self.label} has not been prepared")
        return self._update

    def ask(self) -> None:
        """Mark it as requested."""
        if not self.asked:
            self.asked, self.early_seconds = True, time.monotonic() - self._begun

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            WeighbridgeError: it failed.
        """
        self._thread.join()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Release the memory: at once, or when the running fetch has ended."""
        self._unwanted.set()
        self._ended.add_done_callback(self._free)

    def _run(self, engine: EngineModel, client: EngineClient) -> None:
        with short_turns:
            _, self.error = attempt(partial(self._bring, engine, client))
        _clear_frames(self.error)
        self.seconds = time.monotonic() - self._begun
        self._ended.set_result(None)

    def _bring(self, engine: EngineModel, client: EngineClient) -> None:
        if self._device is not None:  # a thread does not inherit the device, and pinned memory belongs to it
            torch.cuda.set_device(self._device)
        with ExitStack() as stack:
            early = self._stage_early(engine, client, stack) if self._early else None
            self._update = update = lazy.Update(self.recorded.recording, self._incoming(engine, client, early))
            self._note("planned")
            update.prepare(pin=engine.pin)
            self._note("brought")
            with nullcontext() if self._early else engine.staging:
                place = engine.staging_place(self.recorded.recording)
                if not self._unwanted.is_set() and place is not None:
                    # if it was abandoned, the place may belong to another version by now
                    self._stage(engine, update, place, early)

    def _stage_early(self, engine: EngineModel, client: EngineClient, stack: ExitStack) -> lazy.EarlyStaging | None:
        """Stage the data of a version as it arrives, until the version is ready.

        The staging place belongs to this preparation until the stack ends.
        """
        stack.enter_context(engine.staging)
        recording = self.recorded.recording
        early: lazy.EarlyStaging | None = None
        try:
            loan = read_arriving(client, self.source.model, self.number, recording.request, recording.layout)
            early = lazy.EarlyStaging(recording, loan, engine.staging_place(recording))
            stack.callback(early.close)
            if engine.pin:
                early.pin()
            self._note("borrowed")
        except (WeighbridgeError, RuntimeError) as error:
            log.info("%s is fetched only when it is ready: %s", self.label, error)
        self._take_early(early)
        self._note("staged what has arrived")
        while not self._unwanted.is_set():
            asked = self.asked
            with suppress(DeadlineExceeded):
                self._ready = client.wait_for(self.source.model, self.number, VersionState.READY, timeout=_LOOK_SECONDS)
                self._note("ready")
                return early
            if asked:  # by a caller that must not wait for ranks: the request is refused as if nothing had begun early
                return early
        raise FailedPrecondition(f"{self.label} is no longer wanted")

    def _take_early(self, early: lazy.EarlyStaging | None) -> None:
        if early is None:
            return
        try:
            with early.taking():
                pause = _LEAST_PAUSE
                while not early.done and not self._unwanted.wait(pause):
                    asked = self.asked
                    taken = early.take()
                    if asked and not taken:  # a ready version has no outstanding data
                        return
                    pause = _LEAST_PAUSE if taken else min(2 * pause, _MOST_PAUSE)
        except (WeighbridgeError, RuntimeError) as error:  # from torch: staged data is always compared
            log.warning("%s is not staged while it arrives: %s", self.label, error)

    def _incoming(
        self, engine: EngineModel, client: EngineClient, early: lazy.EarlyStaging | None
    ) -> lazy.IncomingSlices:
        """The incoming version, once checks show that the engine can load it."""
        recorded, recording = self.recorded, self.recorded.recording
        if early is not None and self._ready is not None and not recording.unrecorded:
            arrived = early.arrived(self._ready)
            if arrived is not None and early.tensors_digest == recorded.tensors_digest:
                check_model(engine.config, client, self._ready)
                return arrived
        source = self.source.open(client, self.number)
        check_model(engine.config, client, source.version)
        recorded.check(source)
        if not recorded.has_dtypes_of(source):
            raise RecordingStale(f"{source.version} has other dtypes than the previous version", fix="prepare it again")
        self.rest = engine.bring_rest(client, source, recording)
        if source.fetched_bytes:
            self.nbytes = recording.nbytes + source.fetched_bytes
        return lazy.pull_recorded(client, recording, self.source.model, self.number, self.source.draft)

    def _stage(
        self,
        engine: EngineModel,
        update: lazy.Update,
        place: lazy.StagingPlace,
        early: lazy.EarlyStaging | None,
    ) -> None:
        try:
            there = frozenset[str]()
            if early is not None and isinstance(update.incoming, lazy.Arrived):
                there = early.agreed()
            self._note("compared")
            update.stage(place, there)
            self._note("staged")
            if place is engine.place:
                self._process(engine, update)
                self._note("processed")
            if early is not None:
                log.info(
                    "%s: of %d parameters %d were staged while it arrived, and %d of these are used",
                    self.label, len(self.recorded.recording.targets), early.count, len(there),
                )  # fmt: skip
        except RuntimeError as error:  # from torch: the bytes have arrived, and can be applied from where they are
            log.warning("%s could not be copied to the memory that is reserved for it: %s", self.label, error)

    def _process(self, engine: EngineModel, update: lazy.Update) -> None:
        try:
            engine.process_staged(update, self.recorded.recording)
        except Exception:  # any: layers that are not processed here are processed in the pause
            log.exception("%s is not processed before the pause", self.label)

    def _note(self, what: str) -> None:
        seconds, computed = time.monotonic() - self._begun, time.thread_time()
        log.debug("%s: %s after %.4f s, of which %.4f on a processor", self.label, what, seconds, computed)

    def _free(self, _ended: Future[None]) -> None:
        if self._update is not None:
            self._update.close()
        self._update, self.rest = None, []


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error: they would hold granted memory until the garbage collector runs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
