"""Folders that become versions: the newest complete step of a trainer is pushed whenever it changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import Version, VersionState
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.side_files.reading import SideFiles
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, WeighbridgeError
from weighbridge.relay.relayed import Relayed
from weighbridge.relay.steps import STEPS, StepNames, contents

log = logging.getLogger(__name__)

CONTENTS = "weighbridge/folder"
"""Key in a version's metadata of the digest of the folder that it was read from."""
_NEWEST = 32
"""Number of the newest versions that are searched for the last one that was read from a folder."""
_PAUSES = (1.0, 30.0)
"""First and longest pause before a failed step is retried, in seconds."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A complete step, as found on disk."""

    step: int
    folder: Path
    marker: Path
    contents: str


@dataclass(frozen=True, slots=True)
class _Pushed:
    """The newest version that was read from a folder."""

    step: int
    contents: str
    number: int
    stored: bool


@dataclass
class Outgoing:
    """Pushes the steps of one folder as versions of one model.

    Only the newest complete step is pushed. Steps that are superseded before their turn are skipped. The newest one is
    pushed again if its files or its marker are rewritten, and an older one if the later ones are deleted, as by a
    trainer that goes back. The last pushed step is read from the service, so that a new process continues after another
    one.

    Attributes:
        client: client of the service.
        model: ``namespace/name``.
        root: the folder of all steps.
        names: names of the folders in it.
        hf_dir: folder of ``config.json`` and the tokenizer, to register the model with the tensors of the first step if
            it is not registered.
        cast: as for `TrainerClient.push_folder`.
        poll_seconds: interval between checks of the folder.
    """

    client: TrainerClient
    model: str
    root: Path
    names: StepNames = STEPS
    _: KW_ONLY
    hf_dir: Path | None = None
    cast: str = "allow"
    poll_seconds: float = 0.5
    _asked: bool = field(default=False, init=False)
    _last: _Pushed | None = field(default=None, init=False)
    _refused: str = field(default="", init=False)

    def run(self) -> Iterator[Relayed]:
        """Relay until the process ends. Yields each step that was pushed, and each failure; a refused step is not
        retried until it changes. An unreadable folder is reported once, and read again.
        """
        pause, longest = _PAUSES
        told: Relayed | None = None
        while True:
            found = self._due()
            if not isinstance(found, _Found):
                if found is not None and found != told:
                    yield found
                told = found
                self._check_stored()
                time.sleep(self.poll_seconds)
                continue
            started = time.monotonic()
            try:
                version = self._relay(found)
            except (WeighbridgeError, OSError) as error:
                if isinstance(error, InvalidArgument | DataLoss):
                    self._refused = found.contents
                problem = _unreadable(error) if isinstance(error, OSError) else str(error)
                yield Relayed(self.model, found.step, str(found.folder), error=problem)
                time.sleep(pause)
                pause = min(2 * pause, longest)
                continue
            pause = _PAUSES[0]
            if version is not None:
                folder, seconds = str(found.folder), round(time.monotonic() - started, 3)
                yield Relayed(self.model, found.step, folder, version.number, version.tensor_bytes, seconds)

    def _due(self) -> _Found | Relayed | None:
        """The step to be pushed, or a report that it cannot be read; None if there is none."""
        step: int | None = None
        last, folder = self._last, self.root
        try:
            step = self.names.newest_complete(self.root)
            if step is None:
                return None
            if last is not None and step < last.step and self.names.path(self.root, last.step).exists():
                return None  # the newer one is being written again
            folder, marker = self.names.path(self.root, step), self.names.marker_of(self.root, step)
            found = _Found(step, folder, marker, contents(folder, marker))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.path.islink(error.filename):
                return None  # it is being removed; only a dangling link is an error
            return Relayed(self.model, step, str(folder), error=_unreadable(error))
        known = (self._refused, "" if last is None else last.contents)
        return None if found.contents in known else found

    def _relay(self, found: _Found) -> Version | None:
        """Push a step; None if it was pushed before.

        The version becomes visible only if the folder has not changed since it was found.
        """
        self._register(found)
        if not self._asked:
            self._last, self._asked = self._pushed_before(), True
            return None
        handle: PushHandle | None = None
        try:
            handle = self.client.push_folder(
                self.model,
                found.folder,
                step=found.step,
                cast=self.cast,
                hold_seal=True,
                metadata={CONTENTS: found.contents},
            )
            handle.report()
            _check_same(found)
            handle.seal()
            version = handle.wait(VersionState.READY)
        except BaseException as error:
            # also if the process is to exit: closing the client waits for the transfer, and the service for the seal
            failed = isinstance(error, WeighbridgeError | OSError)
            if handle is not None:
                with suppress(WeighbridgeError):  # it has failed already, or will fail without this
                    reason = str(error) if failed else "the relay was ended"
                    self.client.abort(self.model, handle.number, reason)
            if failed:
                _check_same(found)
            raise
        self._last = _Pushed(found.step, found.contents, version.number, version.state.stored)
        return version

    def _register(self, found: _Found) -> None:
        """Register the model if it is not registered and ``hf_dir`` is set."""
        if self.hf_dir is None:
            return
        try:
            self.client.model(self.model)
        except NotFound:
            sides = SideFiles.read(self.hf_dir)
            sides.tell(self.model, self.hf_dir)
            files = sides.files
            try:
                weights = FolderWeights.read(found.folder, files["config.json"])
            except (NotFound, OSError) as error:
                _check_same(found)
                raise FailedPrecondition(f"{found.folder} cannot be read: {error}") from error
            self.client.register_files(self.model, files, "", weights.layout.tensors.values())
        self.hf_dir = None

    def _pushed_before(self) -> _Pushed | None:
        """The newest version that was read from a folder; None if there is none."""
        for version in self.client.versions(self.model, limit=_NEWEST):
            if CONTENTS in version.metadata:
                read = str(version.metadata[CONTENTS])
                return _Pushed(version.step, read, version.number, version.state.stored)
        return None

    def _check_stored(self) -> None:
        """Let the last step be pushed again if its version was lost before it was stored."""
        last = self._last
        if last is None or last.stored:
            return
        try:
            state = self.client.version(self.model, last.number).state
        except NotFound:
            state = VersionState.FAILED
        except WeighbridgeError as error:
            log.debug("the state of %s@%d cannot be read: %s", self.model, last.number, error)
            return
        if state.given_up:
            log.warning("%s@%d was lost before it was stored", self.model, last.number)
            self._last = None
        elif state.stored:
            self._last = replace(last, stored=True)


def _unreadable(error: OSError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}" if error.filename else str(error)


def _check_same(found: _Found) -> None:
    """Raise FailedPrecondition if a step's folder has changed since it was found; OSError if it cannot be read."""
    try:
        now = contents(found.folder, found.marker)
    except FileNotFoundError as error:
        raise FailedPrecondition(
            f"step {found.step} was deleted while {found.folder} was read",
            fix="nothing, if the trainer has written a newer step; otherwise let it keep more steps",
        ) from error
    if now != found.contents:
        raise FailedPrecondition(
            f"step {found.step} was written again while {found.folder} was read",
            fix="nothing: it is read again",
        )
