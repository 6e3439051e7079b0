"""Client for models, versions and refs; base of the clients of trainers and engines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, Unpack

from weighbridge._clients.calls import (
    engine_calls,
    model_calls,
    push_calls,
    ref_calls,
    version_calls,
)
from weighbridge._clients.calls.operation_calls import ask
from weighbridge._clients.calls.watching import Watch
from weighbridge._clients.connection import Connection
from weighbridge._clients.operation_methods import OperationMethods
from weighbridge._clients.transport import ConnectionOptions
from weighbridge._core.engines.facts import Engine
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.operations import table
from weighbridge._core.pauses import DICE
from weighbridge._core.references import Reference
from weighbridge._core.resources import (
    REF_LIVE,
    DeletedModel,
    Model,
    Protection,
    RefRequest,
    Signature,
    Version,
    VersionState,
)
from weighbridge._transport.outages import Outage
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError

if TYPE_CHECKING:
    import torch

__all__ = ["Client"]

log = logging.getLogger(__name__)

_SLOW_SECONDS = 2.0
"""After which a registration says what it waits for."""


class Client(OperationMethods):
    """Connections to the service. Every method that takes a model and a version takes ``namespace/name@version`` for both.

    Connects when first used; safe to use from several threads, and after a fork only
    if it was not used before.

    Args:
        server: ``host:port`` of the gRPC face; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. Several addresses of
            replicas, with commas between them, are used in turn: the next one when the one in use cannot be reached.
        options: ``retry_seconds``, ``lane``, ``connections`` and ``credentials``: see `ConnectionOptions`.

    Raises:
        InvalidArgument: there is no such port or lane, or there cannot be so many connections.
    """

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        self._connection = Connection(server, **options)

    def __repr__(self) -> str:
        closed = ", closed" if self._connection.closed else ""
        return f"<{type(self).__name__} of {self.server}{closed}>"

    @property
    def server(self) -> str:
        """The service's address; several with commas between them."""
        return str(self._connection.addresses)

    @property
    def retry_seconds(self) -> float:
        """How long to keep trying when the service cannot be reached, or has no room."""
        return self._connection.retry_seconds

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are gone."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register_files(
        self,
        model: str,
        files: Mapping[str, bytes],
        dtype: str | torch.dtype = "",
        tensors: Iterable[TensorSpec] = (),
        *,
        weight_map: bool = True,
    ) -> Model:
        """Register a model by the content of its files, ``config.json`` among them. Repeating it is harmless.

        Args:
            model: ``namespace/name``.
            files: content of the files besides the weights, by name.
            dtype: of the weights; by default what ``tensors`` says, or else ``config.json``.
            tensors: the tensors in its files of weights, if there are such files. Of a model type without a weight map they are all that
                is known.
            weight_map: False registers it by ``tensors`` alone, although there may be a weight map for its model type.

        Raises:
            InvalidArgument: its model type has no weight map and there are no ``tensors``, or a name or a file is wrong.
            FailedPrecondition: the model is registered already, with other tensors.
        """

        def tell() -> None:
            if not self._connection.addresses.away:  # of which is told besides
                log.warning(
                    "%s is being registered: the first weight map of a model type takes a while to make",
                    model,
                )

        telling = threading.Timer(_SLOW_SECONDS, tell)
        telling.daemon = True
        if weight_map:
            telling.start()
        try:
            return self._connection.run(
                model_calls.register_model(
                    model_calls.registration(model, files, dtype, tensors, weight_map=weight_map)
                )
            )
        finally:
            telling.cancel()

    def model(self, model: str, *, retry_seconds: float | None = None) -> Model:
        """One model; ``retry_seconds`` overrides the client's for this call. Raises NotFound."""
        return self._connection.run(ask(table.GET_MODEL, model=model), retry_seconds=retry_seconds)

    def model_files(self, model: str, version: str | int | None = None) -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now if no version is named.

        Raises:
            NotFound: no such model or version.
            DataLoss: a name is none that a file in the model's own folder can have.
        """
        return self._connection.run(model_calls.model_files(model, version))

    def version(self, model: str, version: str | int | None = None) -> Version:
        """One version, by number or ref; by default the latest. Raises NotFound."""
        return self._connection.run(version_calls.get_version(model, version))

    def wait_for(
        self,
        model: str,
        version: str | int | None,
        state: VersionState,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Version], None] | None = None,
    ) -> Version:
        """Wait until a version has reached a state.

        Args:
            model: which model.
            version: which version; None for the one that ``model`` names.
            state: OPEN, RECEIVING, READY, VERIFIED or DURABLE.
            timeout: seconds; None waits as long as it takes.
            on_progress: is called with the version as it stands now and then.

        Raises:
            VersionFailed: it failed, or could not be made durable.
            DeadlineExceeded: not in time.
        """
        return self._connection.run(version_calls.wait_for(model, version, state, timeout, on_progress))

    def versions(
        self,
        model: str,
        *,
        include_invisible: bool = False,
        where: Sequence[str] = (),
        limit: int | None = None,
    ) -> list[Version]:
        """A model's versions, newest first.

        Args:
            model: which model.
            include_invisible: also those still being received, and those that have failed lately.
            where: only those of whose metadata all of these are true, such as ``reward>=0.7``; with ``= != < <= >`` or ``>=``. A version
                without the value is left out, and so are those behind the newest 10,000.
            limit: only so many, the newest ones; None for all.

        Raises:
            InvalidArgument: one of these compares nothing, or ``limit`` is less than 1.
        """
        listing = version_calls.list_versions(
            model, include_invisible=include_invisible, where=where, limit=limit
        )
        return self._connection.run(listing)

    def watch(self, model: str, ref: str | None = None) -> Iterator[Version]:
        """The version a ref names now, then each one it moves to, for ever; by default ``live``. Reconnects when the service comes back.

        A version that is replaced before it could be sent may be left out; the newest never is. A ref that does not exist yet is waited
        for, and so is a model that is not registered yet; after 10 s, and then every 10 s, a WARNING says what is waited for.

        Raises:
            InvalidArgument: no model, or no ref, can have this name.
            NotFound: the model was deleted.
            Unavailable, ResourceExhausted: the service could not be reached, or had no place for another watch, within
                `retry_seconds` from the start.
        """
        meant = Reference.of(model, ref, REF_LIVE)
        for _, version in self.watch_refs([(meant.model, meant.version)]):
            yield version

    def watch_refs(self, refs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Version]]:
        """As `watch`, for several refs, also of several models, over one stream.

        Args:
            refs: model and ref of each.

        Yields:
            The ref, and the version that it names; which model's it is says the version.
        """
        watch, outage = Watch.begin(refs, self.retry_seconds), Outage(self.server)
        with self._connection.reminding(lambda: watch.missing):
            while True:
                failure: WeighbridgeError = Unavailable(f"the service at {self.server} is shutting down")
                try:
                    for response in self._connection.responses(*watch.call):
                        outage.over()
                        if response is None:
                            watch = watch.begun()
                            continue
                        index, version = response
                        watch = watch.received(index, version.number)
                        yield watch.refs[index][1], version
                except (Unavailable, ResourceExhausted) as error:
                    failure = error
                outage.failed(failure, watch.left(time.monotonic()))
                pause, watch = watch.failed(
                    failure, closed=self._connection.closed, now=time.monotonic(), jitter=DICE.random()
                )
                self._connection.pause(pause)

    def refs(self, model: str) -> dict[str, int]:
        """Version number by ref."""
        return dict(self._connection.run(ask(table.LIST_REFS, model=model)).refs)

    def request_ref(
        self,
        model: str,
        ref: str,
        version: str | int | None = None,
        *,
        note: str = "",
        request_id: str = "",
    ) -> RefRequest:
        """As `set_ref`, but if that takes the approval of other identities, ask for it.

        Args:
            model: which model.
            ref: the tag.
            version: which version; by default the latest.
            note: is kept with the request.
            request_id: names this call in all repetitions of it, 1 to 64 letters, digits, ``-`` or ``_``; by default one of its own. The service
                names the request: `RefRequest.request_id`.

        Returns:
            The request as it stands: `RefRequest.done`, or `RefRequest.pending` until others approve it (`approve_ref`).

        Raises:
            PermissionDenied: the tag is protected, and no scope of this client's names it.
            FailedPrecondition: the request of this call was withdrawn, superseded, or has expired.
        """
        return self._connection.run(ref_calls.request_ref(model, ref, version, note, request_id))

    def request_ref_deletion(
        self, model: str, ref: str, *, note: str = "", request_id: str = ""
    ) -> RefRequest:
        """As `delete_ref`, but if that takes the approval of other identities, ask for it; see `request_ref`."""
        return self._connection.run(ref_calls.request_by(table.DELETE_REF, model, ref, note, request_id))

    def ref_requests(self, model: str) -> list[RefRequest]:
        """Requests to change protected refs: those that are pending, and the last ones that have ended, in the order of asking."""
        return list(self._connection.run(ask(table.LIST_REFS, model=model)).requests)

    def protections(self, model: str) -> list[Protection]:
        """What it takes to change those refs of a model that are protected. Raises NotFound."""
        return list(self._connection.run(ask(table.LIST_REFS, model=model)).protections)

    def unprotect_ref(self, model: str, ref: str, *, note: str = "", request_id: str = "") -> RefRequest:
        """Protect a ref no longer, or ask for it: it takes what it takes to move it; see `request_ref`."""
        return self._connection.run(
            ref_calls.request_by(table.DELETE_PROTECTION, model, ref, note, request_id)
        )

    def tensor_digests(self, model: str, version: str | int | None = None) -> Mapping[str, str]:
        """XXH3-128 of each tensor's bytes by its name, as 32 hex digits, as the manifest of a version says; by default of the latest.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: the version is not durable yet.
        """
        return self._connection.run(version_calls.tensor_digests(model, version))

    def signatures(self, model: str, version: str | int | None = None) -> tuple[Signature, ...]:
        """The signatures of a version, whoever they are by; by default of the latest. Raises NotFound, and FailedPrecondition if the
        version is not durable."""
        return self._connection.run(version_calls.get_signatures(model, version))[1]

    def approve(
        self, model: str, version: str | int | None = None, *, note: str = "", by: str = ""
    ) -> Version:
        """Hold a version no longer: ``live`` and ``latest`` may name it, if it is newer than what they name. Repeating it is harmless.

        Args:
            model: which model.
            version: its number; None if ``model`` names it, as ``acme/smol@17`` does.
            note: is kept with the approval.
            by: who approves it, where the service has no policy; by default the address that it sees. Under a policy it is the caller's
                identity.

        Returns:
            The version after that. One that was not held is as it was.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is not complete yet, or was taken out of history.
        """
        return self._connection.run(version_calls.approve(model, version, by=by, note=note))

    def delete_model(self, model: str, *, force: bool = False) -> DeletedModel:
        """Take a model away with all of its versions, refs and rules.

        Its name can be registered again at once, also with other tensors; the numbers of its versions go on, so that none is given twice.
        Streams that are under way go on for a grace time; then the versions' objects are deleted by collections.

        Args:
            model: which model.
            force: whether it is deleted although adapters are on versions of it, whose versions then say that they lack them.

        Raises:
            NotFound: the model is not registered.
            FailedPrecondition: versions are being received, or adapters are on versions of it (names them).
        """
        return self._connection.run(model_calls.delete_model(model, force=force))

    def abort(
        self, model: str, version: str | int | None = None, reason: str = "aborted by a client"
    ) -> Version:
        """Give a version up, by its number, that has not become visible yet, or that cannot be made durable.

        The latter stays visible until a newer version is; no further attempt is made.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is visible already, and nothing keeps it from becoming durable.
        """
        return self._connection.run(push_calls.abort(model, version, reason))

    def engines(self, model: str | None = None) -> list[Engine]:
        """Engines whose agents have reported lately, by model and address: what each serves, and how far behind its ref it is.

        Args:
            model: ``namespace/name``; None for the engines of all models that this client may look at.

        Raises:
            NotFound: the model is not registered.
        """
        return self._connection.run(engine_calls.list_engines(model))


def manifest_of(client: Client, model: str, number: int) -> ManifestText:
    """The manifest of a version. Raises as `get_manifest`."""
    return client._connection.run(version_calls.get_manifest(model, number))
