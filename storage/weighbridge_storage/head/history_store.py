"""Reader and writer of the nodes of histories, in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from weighbridge._core.lru import Cache
from weighbridge.errors import NotFound
from weighbridge_storage.documents.names import ModelName, node_key
from weighbridge_storage.head import history_nodes
from weighbridge_storage.head.history import NodeMissing
from weighbridge_storage.head.history_nodes import Node, NodeRef
from weighbridge_storage.stores.objects import ObjectStore

_CACHED_BYTES = 4 << 20
"""Maximum bytes of text of the cached nodes, about 300 for each version.

Parsed nodes use about three times as much memory.
"""
_WRITES_AT_ONCE = 8


class NodeStore:
    """The nodes of all models' histories. Thread-safe.

    It caches the most recently read or written nodes, because nodes never change.

    Args:
        store: the store that contains them.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._cache: Cache[tuple[Node, int]] = Cache(_CACHED_BYTES, lambda cached: cached[1])

    def load(self, model: ModelName, ref: NodeRef) -> Node:
        """Read a node.

        Raises:
            NodeMissing: the node is not in the store. DataLoss, FailedPrecondition: as `history_nodes.from_json`.
            WeighbridgeError: as `ObjectStore.get`.
        """
        key = node_key(model, ref.name)
        cached = self._cache.get(key)
        if cached is not None:
            return cached[0]
        try:
            data, _ = self._store.get(key)
        except NotFound as error:
            raise NodeMissing(key) from error
        node = history_nodes.from_json(data, ref, key)
        self._cache.put(key, (node, len(data)))
        return node

    def write(self, model: ModelName, nodes: Mapping[str, Node]) -> None:
        """Write nodes. After an error, some of them may be in the store.

        Raises:
            WeighbridgeError: as `ObjectStore.put`.
        """

        def write(item: tuple[str, Node]) -> None:
            name, node = item
            key, text = node_key(model, name), history_nodes.to_json(node)
            self._store.put(key, text, mode="overwrite")  # with the same text, if another attempt has written it
            self._cache.put(key, (node, len(text)))

        if len(nodes) < 2:
            for item in nodes.items():
                write(item)
            return
        with ThreadPoolExecutor(_WRITES_AT_ONCE, thread_name_prefix="history") as pool:
            list(pool.map(write, nodes.items()))
