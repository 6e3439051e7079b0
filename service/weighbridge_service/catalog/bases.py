"""Bases of adapters: look-up, comparison, pins, and their release.

`weighbridge_storage.head.pins` explains the order of writes.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from weighbridge._core.file_names import ADAPTER_CONFIG, is_adapter
from weighbridge._core.layouts import TensorSpec, adapter_digest
from weighbridge._core.lru import Cache
from weighbridge._core.metadata import BaseVersion, Metadata
from weighbridge._core.operations.verbs import Verb
from weighbridge._core.pauses import DICE
from weighbridge._core.references import parse_reference
from weighbridge._core.resources import REF_LATEST, Model
from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge_service.access.peer import Peer, authorize
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.head_versions import number_in
from weighbridge_service.models.adapters import check_fits
from weighbridge_service.models.bridges import parse_config
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.registration import is_adapter_head
from weighbridge_storage.documents import document_digests
from weighbridge_storage.documents.entries import OpenEntry, PinEntry
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.head.pins import doubt, is_on, pin, place, unpin
from weighbridge_storage.head.repinning import repin
from weighbridge_storage.versions.manifest import FORMAT

log = logging.getLogger(__name__)

DEFAULT_ADAPTERS = 1000
"""Maximum number of pins of one identity in the head of one base, unless the policy sets another number."""
_KEPT_DIGESTS = 256
_DIGEST_END = 66
"""Number of last bytes of a manifest that contain its digest; they begin with it."""
_PUSH_ADAPTER = "import ADAPTER_DIR MODEL --base BASE@VERSION, or trainer.push_adapter(..., base=...)"


class Bases:
    """Bases of adapters. Thread-safe.

    Args:
        catalog: the registered models.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._digests: Cache[str] = Cache(_KEPT_DIGESTS)

    def find(self, model: RegisteredModel, wanted: str, by: Peer | None) -> BaseVersion | None:
        """The base of a version that is about to be opened; None if the model is not an adapter.

        Args:
            model: the model.
            wanted: the base as the caller names it, by a number or a ref; empty if it names none.
            by: the peer that opens the version, which must be allowed to pull the base.

        Raises:
            InvalidArgument: an adapter is pushed without a base, another model with one, or the base is an adapter
                itself.
            NotFound: the base does not exist.
            PermissionDenied: the peer may not pull it.
            FailedPrecondition: the base is not durable.
            LayoutError: the adapter does not fit the base.
        """
        if not model.is_adapter:
            if wanted:
                raise InvalidArgument(
                    f"{model.name} is registered as a model of its own, and a push names {wanted[:80]} as its base",
                    fix="push the adapter under another model name",
                )
            return None
        if not wanted:
            raise InvalidArgument(
                f"{model.name} is an adapter, and a version of it names the base that it is on",
                fix=f"{_PUSH_ADAPTER}; a whole model is pushed under another model name",
            )
        found = self._fitting(model.tensors.values(), model.config_json, model.adapter_digest, wanted, by)
        return replace(found, digest=self._digest(ModelName.parse(found.model), found.number))

    def register_model(
        self,
        name: str,
        files: Mapping[str, bytes],
        dtype: str,
        found: Sequence[TensorSpec],
        *,
        weight_map: bool,
        base: str,
        by: Peer,
    ) -> Model:
        """Register a model. An adapter that could not be pushed to the named base is not registered.

        Args:
            name, files, dtype, found, weight_map: as for `Catalog.register_model`.
            base: the version that the adapter will be pushed to, by a number or a ref; empty if none is named.
            by: the peer that registers the model.

        Raises:
            InvalidArgument: a base is named for a model that is not an adapter.
            ResourceExhausted: the peer has as many pins in the base's head as its quota allows.
            WeighbridgeError: as `find` and `Catalog.register_model`.
        """
        if base:
            if not is_adapter(files):
                raise InvalidArgument(
                    f"{name} is not an adapter, but its registration names {base[:80]} as its base",
                    fix="leave the base out",
                )
            config_json = files[ADAPTER_CONFIG]
            on = self._fitting(found, config_json, adapter_digest(config_json, found), base, by)
            asked, most = PinEntry(on.number, name, by.name), by.identity.limits.adapters
            history = self._catalog.history(ModelName.parse(on.model))
            pin(history, asked, DEFAULT_ADAPTERS if most is None else most)
        return self._catalog.register_model(name, files, dtype, found, weight_map=weight_map, shown=by.sees)

    def _fitting(
        self, tensors: Iterable[TensorSpec], config_json: bytes, digest: str, wanted: str, by: Peer | None
    ) -> BaseVersion:
        """The named base, without its digest, if the adapter with these tensors and this config fits it. ``digest`` is
        the digest of both.

        Raises the same errors as `find`.
        """
        found = self._resolve(wanted, by)
        base = self._catalog.model(ModelName.parse(found.model))
        if base.is_adapter or base.by_version:
            kind = "an adapter itself" if base.is_adapter else "a training state"
            raise InvalidArgument(f"the base {found} is {kind}", fix="name the model that the adapter was trained on")
        if base.fitting.get(digest) is None:
            check_fits(tensors, base.tensors, parse_config(config_json), str(found))
            base.fitting.put(digest, True)
        return found

    def _resolve(self, wanted: str, by: Peer | None) -> BaseVersion:
        meant = parse_reference(wanted)
        version = meant.version or REF_LATEST
        if by is not None:
            authorize(by, Verb.PULL, meant.model, version)
        found = self._catalog.resolve(ModelName.parse(meant.model), version)
        if not found.state.stored or found.error:
            raise FailedPrecondition(
                f"the base {found} is {found.state.value}",
                fix="name a version that is not deleted, and wait until it is durable",
            )
        return BaseVersion(meant.model, found.number)

    def _digest(self, model: ModelName, number: int) -> str:
        """The digest in the manifest of a version."""

        def read() -> str:
            key = version_key(model, number, MANIFEST_FILE)
            with self._catalog.unless_deleted(model, number):
                data, _ = self._catalog.store.get(key)
            document_digests.decode(data, key, FORMAT)
            return data[-_DIGEST_END:-2].decode()

        return self._digests.get_or_make((model, number), read)

    def check_same(self, opened: int, metadata: Metadata, wanted: str) -> None:
        """Refuse a rank that names another base than the rank that has opened the version, or another number of the
        same base.

        Args:
            opened: number of the version that was opened.
            metadata: its metadata.
            wanted: the base as the rank names it; empty if it names none.

        Raises:
            InvalidArgument: the rank names another base.
        """
        there = BaseVersion.of(metadata)
        meant = parse_reference(wanted) if wanted else None
        if there is None or meant is None:
            return
        number = number_in(meant.version)
        if meant.model != there.model or number not in (None, there.number):
            raise InvalidArgument(
                f"two ranks name different bases of version {opened}: {there} and {meant.model}@{meant.version}",
                fix="all ranks of a push name the same base",
            )

    def pin(self, adapter: ModelName, entry: OpenEntry, most: int | None = None) -> None:
        """Pin the base of an open version, so that it is kept.

        Args:
            adapter: the model.
            entry: the version, which is in the adapter's head already.
            most: number of pins that the identity which has opened it may have in the base's head; None for the
                default.

        Raises:
            NotFound: the base was deleted in the meantime.
            ResourceExhausted: the identity has as many pins as its quota allows.
        """
        base = BaseVersion.of(entry.metadata)
        if base is None:
            return
        model = ModelName.parse(base.model)
        asked = PinEntry(base.number, str(adapter), entry.by)
        limit = DEFAULT_ADAPTERS if most is None else most
        self._catalog.heads.edit(model, lambda history: (pin(history, asked, limit), None))

    def release(self, model: ModelName, number: int | None = None, most: int | None = None) -> int:
        """Remove the pins of a base that no version of an adapter needs any more. Returns their number.

        May be repeated, and stopped anywhere. An adapter whose head cannot be read keeps its pins. Nothing is written
        if no pin is removed.

        Args:
            model: the base.
            number: number of the version whose pins are checked; None for all.
            most: most pins to check, drawn at random if there are more: each check reads the head of an adapter. None
                for all.
        """
        heads = self._catalog.heads
        found = heads.read(model)
        pins = [each for each in (() if found is None else found[0].pins) if number in (None, each.version)]
        if most is not None and len(pins) > most:
            pins = DICE.sample(pins, most)
        unused = [place(each) for each in pins if not self._is_needed(model, each)]
        if not unused:
            return 0
        mark = uuid.uuid4().hex
        heads.update(model, lambda head: (doubt(head, unused, mark), None))
        # read again: from now on, a push finds the doubt mark
        gone = [place(each) for each in pins if place(each) in unused and not self._is_needed(model, each)]
        count: int = heads.update(
            model, lambda head: ((after := unpin(head, gone, mark)), len(head.pins) - len(after.pins))
        )
        return count

    def _is_needed(self, model: ModelName, pin: PinEntry) -> bool:
        """Whether a version of the adapter is based on the pinned version, or the adapter's head cannot be read."""
        try:
            adapter = self._catalog.heads.history_of_any(ModelName.parse(pin.adapter))
            return adapter is None or is_on(adapter, str(model), pin.version)
        except WeighbridgeError as error:
            log.warning("could not check whether %s is still on %s@%d: %s", pin.adapter, model, pin.version, error)
            return True

    def renew(self, adapter: ModelName) -> None:
        """Pin the unpinned bases of an adapter's versions, such as after the base's head was lost.

        Deleted bases stay deleted.
        """
        history = self._catalog.heads.history(adapter)
        if history is not None and is_adapter_head(history.head):
            repin(self._catalog.heads, adapter, history)


def check_registered_so(model: RegisteredModel, digest: str) -> None:
    """Refuse to open a version of an adapter whose registration differs from the rank's adapter.

    Args:
        model: the registration.
        digest: digest of the rank's adapter.

    Raises:
        FailedPrecondition: the adapter is registered with another config or other tensors, or as a model.
    """
    if model.adapter_digest != digest:
        raise registered_otherwise(model.name)


def registered_otherwise(name: ModelName) -> FailedPrecondition:
    """Error of a rank whose adapter differs from the registered one."""
    return FailedPrecondition(
        (
            f"{name} is registered with a different adapter_config.json or with other tensors than "
            "are pushed: another rank or another job has registered it"
        ),
        fix="give the adapters of all ranks the same config, such as lora_alpha; let one job push to this name",
    )


def check_same_adapter(opened: int, model: RegisteredModel, digest: str) -> None:
    """Refuse a rank whose adapter differs from the one with which a version was opened.

    Args:
        opened: number of the version.
        model: the registration with which it was opened.
        digest: digest of the rank's adapter.

    Raises:
        InvalidArgument: the adapters differ.
    """
    if model.adapter_digest != digest:
        raise InvalidArgument(
            (
                "two ranks have different adapter_config.json or different tensors, and version "
                f"{opened} was opened with one of them"
            ),
            fix=(
                "give the adapters of all ranks the same config, such as lora_alpha; change it "
                "between pushes only after all ranks have finished the previous push"
            ),
        )
