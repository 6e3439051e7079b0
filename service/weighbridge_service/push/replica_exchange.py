"""Exchange of messages, through the object store, between replicas that receive one version together.

::

    models/<namespace>/<name>/
      layouts/<digest>                     a layout that a rank has declared, for replicas that do not know it
      incoming/000000000017/
        declared-<boot>-<n>                declarations of ranks at one replica, in batches
        written-<number of the replica>    names and digests of the files that the replica has written

No object is rewritten with other content. The objects under a version's number are not needed once it is published or
given up; later versions use layouts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from google.protobuf.message import DecodeError

from weighbridge._core.layouts import Layout
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import wire
from weighbridge.errors import DataLoss, InvalidArgument, NotFound, VersionFailed
from weighbridge.v1 import resources_pb2
from weighbridge_service.plan.declarations import Declaration, Home
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import ModelName, incoming_prefix, layout_key
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.writing import Written

_DECLARED, _WRITTEN = "declared-", "written-"


class Exchange:
    """Messages about one version that one replica sends to the others and reads from them.

    Methods must not be called concurrently.

    Args:
        store: the object store that all replicas share.
        model: name of the model.
        number: number of the version.
        home: this process.
        first_version: the lowest number that a version can have since the model was registered.
    """

    def __init__(self, store: ObjectStore, model: ModelName, number: int, home: Home, first_version: int = 1) -> None:
        self._store = store
        self._model = model
        self._prefix = incoming_prefix(model, number)
        self._home = home
        self._first_version = first_version
        self._told: set[int] = set()
        self._pending: dict[int, Declaration] = {}
        self._batches = 0
        self._heard: set[str] = set()

    def tell(self, declarations: Mapping[int, Declaration]) -> None:
        """Send the declarations of ranks at this replica to the others; those that were sent before are not sent
        again.
        """
        if not self._pending:
            self._pending = {rank: d for rank, d in declarations.items() if rank not in self._told}
        while self._pending:
            # a write that failed may have landed, so the retry puts the same content under the same key
            key = f"{self._prefix}{_DECLARED}{self._home.boot}-{self._batches:06}"
            self._store.put(key, _batch_to_json(self._home, self._pending), mode="overwrite")
            self._batches += 1
            self._told |= self._pending.keys()
            self._pending = {rank: d for rank, d in declarations.items() if rank not in self._told}

    def listen(self) -> Iterator[dict[int, Declaration]]:
        """Declarations of ranks at other replicas since the last call, batch by batch.

        If the consumer of a batch fails, the next call yields the batch again.

        Raises:
            VersionFailed: an object cannot be read as a batch of declarations.
        """
        mine = f"{self._prefix}{_DECLARED}{self._home.boot}-"
        for key in sorted(self._store.list(self._prefix + _DECLARED)):
            if key not in self._heard and not key.startswith(mine):
                content, _ = self._store.get(key)
                try:
                    batch = _batch_from_json(content, key)
                except DataLoss as error:
                    raise VersionFailed(
                        f"the declarations of another replica cannot be read: {error.message}",
                        fix=f"check which process wrote {key}; push the step again",
                    ) from error
                yield batch
                self._heard.add(key)

    def was_here_before(self) -> bool:
        """Whether another process at this one's address, which must have died, took part in the version."""
        return any(
            declaration.home.address == self._home.address for batch in self.listen() for declaration in batch.values()
        )

    def offer_layout(self, digest: str, space: TensorSpace, layout: Layout) -> None:
        """Store a layout for other replicas to read."""
        message = wire.layout_to_proto(layout, space).SerializeToString()
        # an object that exists already is the same: the key contains the digest
        self._store.put(self._layout_key(digest), message, mode="overwrite")

    def _layout_key(self, digest: str) -> str:
        return layout_key(self._model, digest, self._first_version)

    def layout(self, digest: str) -> tuple[TensorSpace, Layout]:
        """Tensor space and layout that another replica has offered under this digest.

        Raises:
            NotFound: no replica has offered it yet.
            DataLoss: the object is not that layout.
        """
        key = self._layout_key(digest)
        content, _ = self._store.get(key)
        try:
            message = resources_pb2.Layout.FromString(content)
            space, layout = wire.space_from_proto(message.space), wire.layout_from_proto(message)
        except (DecodeError, InvalidArgument) as error:
            raise DataLoss(f"{key} is not a layout: {error}") from error
        if layout.digest != digest:
            raise DataLoss(f"{key} contains a different layout than its name states")
        return space, layout

    def hand_in(self, replica: int, claim: str, written: Written) -> None:
        """Send names and digests of the files that this replica has written to the others.

        Args:
            replica: number of this replica in the agreement.
            claim: the agreement.
            written: the files.
        """
        self._store.put(self._written_key(replica), written.to_json(claim), mode="overwrite")

    def handed_in(self, claim: str, replicas: Iterable[int]) -> dict[int, Written]:
        """Files that replicas have written so far.

        Args:
            claim: the agreement.
            replicas: numbers of the replicas to read.

        Returns:
            The files, by the numbers of the replicas that have handed them in.

        Raises:
            DataLoss: an object that one of them has written cannot be read.
        """
        found = {}
        there = set(self._store.list(self._prefix + _WRITTEN))
        for replica in replicas:
            key = self._written_key(replica)
            if key in there:
                with suppress(NotFound):  # another replica has published, and deletes these objects
                    of, written = Written.from_json(self._store.get(key)[0], key)
                    if of == claim:
                        found[replica] = written
        return found

    def _written_key(self, replica: int) -> str:
        return f"{self._prefix}{_WRITTEN}{replica:06}"

    def clear(self) -> None:
        """Delete the messages of the version, which is published."""
        for key in list(self._store.list(self._prefix)):
            self._store.delete(key)


def _batch_to_json(home: Home, declarations: Mapping[int, Declaration]) -> bytes:
    return strict_json.encode(
        {
            "address": home.address,
            "boot": home.boot,
            "ranks": [[rank, d.client_id, d.digest] for rank, d in sorted(declarations.items())],
        }
    )


def _batch_from_json(data: bytes, where: str) -> dict[int, Declaration]:
    fields = strict_json.decode(data, where)
    home = Home(fields.text("address"), fields.text("boot"))
    found = {}
    for item in fields.array("ranks"):
        match item:
            case [int(rank), str(client_id), str(digest)] if type(rank) is int and rank >= 0:
                found[rank] = Declaration(client_id, digest, home)
            case _:
                raise DataLoss(f"{where} contains an invalid declaration")
    fields.end()
    return found
