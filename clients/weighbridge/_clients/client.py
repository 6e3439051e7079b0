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
"""Time after which a slow registration logs what it waits for."""


class Client(OperationMethods):
    """Connections to the service.

    Methods with a ``model`` and a ``version`` argument also accept ``namespace/name@version`` as ``model``.

    A client connects when it is first used. It is thread-safe. After a fork it is safe only if it was not used before
    the fork.

    Args:
        server: ``host:port`` of the service's gRPC server; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051. If
            several addresses of replicas are given, separated by commas, the client uses the next one when it cannot
            reach one of them.
        options: ``retry_seconds``, ``lane``, ``connections`` and ``credentials``: see `ConnectionOptions`.

    Raises:
        InvalidArgument: the port or lane does not exist, or the number of connections is out of range.

    Examples:
        >>> with Client(server) as client:
        ...     print(client.version("acme/smol"))
        acme/smol@1 (durable, step 100)
    """

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        self._connection = Connection(server, **options)

    def __repr__(self) -> str:
        closed = ", closed" if self._connection.closed else ""
        return f"<{type(self).__name__} of {self.server}{closed}>"

    @property
    def server(self) -> str:
        """Address of the service; several are separated by commas."""
        return str(self._connection.addresses)

    @property
    def retry_seconds(self) -> float:
        """Seconds for which a call is retried while the service is unreachable or has no capacity left."""
        return self._connection.retry_seconds

    def close(self) -> None:
        """Close all connections. Tensors that are views of a version stay valid until they are garbage-collected."""
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
        """Register a model by the content of its files, which include ``config.json``. Calling this again is harmless.

        Args:
            model: ``namespace/name``.
            files: content of all files other than the weights, by name.
            dtype: dtype of the weights; by default the dtype of ``tensors``, or else that in ``config.json``.
            tensors: the tensors in the model's weight files, if it has any. A model whose type has no weight map is
                known only by these tensors.
            weight_map: False registers the model only by ``tensors``, even if its model type has a weight map.

        Raises:
            InvalidArgument: the model type has no weight map and ``tensors`` is empty, or a name or a file is invalid.
            FailedPrecondition: the model is already registered with other tensors.
        """

        def tell() -> None:
            if not self._connection.addresses.away:  # other code logs that the service is unreachable
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
        """Return a model. ``retry_seconds`` overrides the client's for this call. Raises NotFound."""
        return self._connection.run(ask(table.GET_MODEL, model=model), retry_seconds=retry_seconds)

    def model_files(self, model: str, version: str | int | None = None) -> dict[str, bytes]:
        """Return the files of a version other than its weights; the model's registered files if no version is named.

        Raises:
            NotFound: the model or version does not exist.
            DataLoss: a file's name is not valid within the model's folder.
        """
        return self._connection.run(model_calls.model_files(model, version))

    def version(self, model: str, version: str | int | None = None) -> Version:
        """Return a version, by number or ref; by default the latest. Raises NotFound.

        Examples:
            >>> version = client.version("acme/smol", "latest")
            >>> version.number, version.step, version.state.value
            (1, 100, 'durable')
        """
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
            model: the model.
            version: number or ref of the version; None if ``model`` names it.
            state: OPEN, RECEIVING, READY, VERIFIED or DURABLE.
            timeout: seconds; None waits without limit.
            on_progress: called repeatedly with the current state of the version.

        Raises:
            VersionFailed: the version failed, or could not be made durable.
            DeadlineExceeded: the version did not reach the state within ``timeout`` seconds.

        Examples:
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200)
            >>> version = client.wait_for("acme/smol", handle.number, VersionState.DURABLE, timeout=60)
            >>> print(version)
            acme/smol@2 (durable, step 200)
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
            model: the model.
            include_invisible: whether to include versions that are still being received, and versions that failed
                recently.
            where: conditions on metadata, such as ``reward>=0.7``, with ``= != < <= >`` or ``>=``. A listed version
                meets all of them. A version without the value is not listed. Only the newest 10,000 versions are
                searched.
            limit: maximum number of versions to list, newest first; None for all.

        Raises:
            InvalidArgument: a condition is malformed, or ``limit`` is less than 1.

        Examples:
            >>> for step, reward in ((200, 0.4), (300, 0.8)):
            ...     version = trainer.push_state_dict("acme/smol", model, step=step, metadata={"reward": reward}).wait()
            >>> [version.number for version in client.versions("acme/smol")]
            [3, 2, 1]
            >>> [version.number for version in client.versions("acme/smol", where=["reward>=0.7"])]
            [3]
        """
        listing = version_calls.list_versions(model, include_invisible=include_invisible, where=where, limit=limit)
        return self._connection.run(listing)

    def watch(self, model: str, ref: str | None = None) -> Iterator[Version]:
        """Yield the version that a ref names now, then each version to which it moves, without end; by default the ref
        ``live``. Reconnects after an outage.

        If the ref moves again before the service has sent a version, that version may be skipped; the newest version is
        never skipped. The watch waits for a ref that does not exist yet, and for a model that is not registered yet.
        Every 10 s it logs a WARNING that names the missing refs.

        Raises:
            InvalidArgument: the name of the model or the ref is not valid.
            NotFound: the model was deleted.
            Unavailable, ResourceExhausted: the service could not be reached, or did not accept another watch, within
                `retry_seconds` from the start.

        Examples:
            >>> versions = client.watch("acme/smol", "latest")
            >>> print(next(versions))
            acme/smol@1 (durable, step 100)
            >>> handle = trainer.push_state_dict("acme/smol", model, step=200)
            >>> print(next(versions))
            acme/smol@2 (durable, step 200)
        """
        meant = Reference.of(model, ref, REF_LIVE)
        for _, version in self.watch_refs([(meant.model, meant.version)]):
            yield version

    def watch_refs(self, refs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Version]]:
        """Watch several refs, of one or more models, over one stream; see `watch`.

        Args:
            refs: pairs of model and ref.

        Yields:
            The ref, and the version that it names; `Version.model` is the model.
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
        """Version number by ref.

        Examples:
            >>> refs = client.refs("acme/smol")
            >>> refs["live"], refs["latest"]
            (1, 1)
        """
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
        """Set a ref as `set_ref` does, or request the change if it needs the approval of other identities.

        Args:
            model: the model.
            ref: the tag.
            version: number or ref of the version; by default the latest.
            note: note that is stored with the request.
            request_id: identifies the call when it is repeated, 1 to 64 letters, digits, ``-`` or ``_``; by default a
                new ID. The ID of the request itself comes from the service: `RefRequest.request_id`.

        Returns:
            The request: `RefRequest.done`, or `RefRequest.pending` until other identities approve it (`approve_ref`).

        Raises:
            PermissionDenied: the tag is protected, and no scope of this client names it.
            FailedPrecondition: the request was withdrawn or superseded, or it has expired.
        """
        return self._connection.run(ref_calls.request_ref(model, ref, version, note, request_id))

    def request_ref_deletion(self, model: str, ref: str, *, note: str = "", request_id: str = "") -> RefRequest:
        """Delete a ref as `delete_ref` does, or request the deletion if it needs the approval of other identities; see
        `request_ref`.
        """
        return self._connection.run(ref_calls.request_by(table.DELETE_REF, model, ref, note, request_id))

    def ref_requests(self, model: str) -> list[RefRequest]:
        """Return the requests to change protected refs, oldest first: the pending ones, and the most recent ones that
        have ended.
        """
        return list(self._connection.run(ask(table.LIST_REFS, model=model)).requests)

    def protections(self, model: str) -> list[Protection]:
        """Return the protected refs of a model, with the requirements for changing them. Raises NotFound."""
        return list(self._connection.run(ask(table.LIST_REFS, model=model)).protections)

    def unprotect_ref(self, model: str, ref: str, *, note: str = "", request_id: str = "") -> RefRequest:
        """Remove the protection of a ref, or request its removal. This needs the same scope and approvals as moving the
        ref; see `request_ref`.
        """
        return self._connection.run(ref_calls.request_by(table.DELETE_PROTECTION, model, ref, note, request_id))

    def tensor_digests(self, model: str, version: str | int | None = None) -> Mapping[str, str]:
        """Return the XXH3-128 of each tensor's bytes by name, as 32 hex digits, from the manifest of a version; by
        default of the latest.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not durable yet.
        """
        return self._connection.run(version_calls.tensor_digests(model, version))

    def signatures(self, model: str, version: str | int | None = None) -> tuple[Signature, ...]:
        """Return all signatures of a version, by any signer; by default of the latest. Raises NotFound, and
        FailedPrecondition if the version is not durable.
        """
        return self._connection.run(version_calls.get_signatures(model, version))[1]

    def approve(self, model: str, version: str | int | None = None, *, note: str = "", by: str = "") -> Version:
        """Release a held version: ``live`` and ``latest`` may then name it, if it is newer than the version that they
        name. Calling this again is harmless.

        Args:
            model: the model.
            version: number of the version; None if ``model`` names it, as ``acme/smol@17`` does.
            note: note that is stored with the approval.
            by: name of the approver, if the service has no policy; by default the caller's address as the service sees
                it. If the service has a policy, it records the caller's identity instead.

        Returns:
            The version after the approval. A version that was not held is unchanged.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not complete yet, or it was retired.

        Examples:
            >>> held = trainer.push_state_dict("acme/smol", model, step=200, candidate=True).wait()
            >>> held.held
            ('candidate',)
            >>> version = client.approve("acme/smol", held.number, note="evaluated")
            >>> version.held, client.refs("acme/smol")["latest"]
            ((), 2)
        """
        return self._connection.run(version_calls.approve(model, version, by=by, note=note))

    def delete_model(self, model: str, *, force: bool = False) -> DeletedModel:
        """Delete a model with all of its versions, refs and rules.

        The name can be registered again immediately, even with other tensors. Version numbers continue, so that a
        number is never used twice. Running streams may continue for a grace time; then collections delete the versions'
        objects.

        Args:
            model: the model.
            force: whether to delete the model even if it is the base of adapters. Versions of these adapters then
                report that their base was deleted.

        Raises:
            NotFound: the model is not registered.
            FailedPrecondition: versions are being received, or the model is the base of adapters (names them).
        """
        return self._connection.run(model_calls.delete_model(model, force=force))

    def abort(self, model: str, version: str | int | None = None, reason: str = "aborted by a client") -> Version:
        """Abort a version, given by its number, that is not visible yet or cannot be made durable.

        A version that cannot be made durable stays visible until a newer version is visible; the service stops trying
        to store it.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is visible, and nothing prevents it from becoming durable.
        """
        return self._connection.run(push_calls.abort(model, version, reason))

    def engines(self, model: str | None = None) -> list[Engine]:
        """Return the engines whose agents have reported recently, ordered by model and address, with the version that
        each serves and how far it is behind its ref.

        Args:
            model: ``namespace/name``; None for the engines of all models that this client may see.

        Raises:
            NotFound: the model is not registered.
        """
        return self._connection.run(engine_calls.list_engines(model))


def manifest_of(client: Client, model: str, number: int) -> ManifestText:
    """Return the manifest of a version. Raises the errors of `get_manifest`."""
    return client._connection.run(version_calls.get_manifest(model, number))
