"""Targets that are stored documents: any writer of a store can forge their content, and any fault can damage it."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence

import numpy as np

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Mutator, Target, stateless
from tests.support.heads import with_digest
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.resources import Gate, Retention
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import DataLoss, WeighbridgeError
from weighbridge_service.models.listed_tensors import ListedTensors
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registration import check_registration, summary_from_head
from weighbridge_service.plan.declarations import Declaration, Home
from weighbridge_service.push import replica_exchange
from weighbridge_service.replicas.directory import ReplicaEntry
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.entries import Approval, FailedEntry, OpenEntry, Ref, VersionEntry
from weighbridge_storage.documents.names import ModelName, node_name
from weighbridge_storage.head import history_nodes
from weighbridge_storage.head.head import Deletion, Head, Mark
from weighbridge_storage.head.history_nodes import Inner, Leaf, NodeRef
from weighbridge_storage.versions.digests import digest_bytes, digest_file
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.writing import Written

_NAME = ModelName("acme", "smol")
_NODE = NodeRef(node_name(3, "a" * 64), 0, 9, 2, 1)


def _entry(number: int, **more: object) -> VersionEntry:
    return VersionEntry(number, 100, "r1", 1, 1000, 3, "f" * 8, f"w{number}", **more)  # type: ignore[arg-type]


def _heads() -> list[bytes]:
    full = Head(
        generation=9,
        next_version=16,
        files_id="f" * 8,
        registration={"model_type": "llama", "dtype": "BF16", "tensor_count": 3, "tensor_bytes": 1000, "files": ["config.json"], "identity": "x", "dtypes": {}, "absent": [], "block": [128, 128]},
        recent={
            10: _entry(10, held=("candidate",), metadata={"reward": 0.5, "run": "x"}),
            11: _entry(11, approval=Approval("me", 5, "fine", ("candidate",)), nonfinite_elements=3),
            12: _entry(12, retired_ms=7),
        },
        removed=frozenset((4,)),
        root=_NODE,
        mark=Mark(_NODE, 2, 5),
        open={13: OpenEntry(13, "id", 1, "r", 2, 1, 2, "f", 11, "claim", metadata={"x": True})},
        failed={14: FailedEntry(14, "why", 3)},
        refs={"latest": Ref(11), "prod": Ref(11)},
        retention=Retention(keep_last=3, keep_every=10, keep_younger_s=60),
        gate=Gate(approval_required=True),
        writes=("w10", "w11"),
    )  # fmt: skip
    empty = Head(generation=1, writes=("w",))
    deleted = Head(generation=3, next_version=8, deletion=Deletion(5, 8, "id", 3), writes=("w",))
    return [each.to_json() for each in (full, empty, deleted)]


def _head(data: bytes) -> None:
    head = Head.from_json(data)
    again = Head.from_json(head.to_json())
    assert again == head
    _ = head.requires, head.ref_numbers, head.latest, head.in_tree(5)
    if head.registration:
        check_registration(_NAME, head)
        summary_from_head(_NAME, head, head.ref_numbers)


def _manifests() -> list[bytes]:
    specs = [
        TensorSpec("embed", dtypes.parse("bf16"), (4, 8)), TensorSpec("norm", dtypes.parse("fp32"), (8,)),
        TensorSpec("none", dtypes.parse("fp32"), (0, 3)), TensorSpec("one", dtypes.parse("fp8_e4m3"), ()),
    ]  # fmt: skip
    found = []
    for most in (1 << 20, 64):
        files = lay_out_files(specs, most)
        digests = {
            file.name: digest_file(files, file.name, np.zeros(file.nbytes, np.uint8), lambda: None)
            for file in files.files
        }
        tensors = {name: entry for each in digests.values() for name, entry in each.tensors.items()}
        listed = {name: each.entry for name, each in digests.items()} | {"config.json": digest_bytes(b"{}")}
        manifest = Manifest(
            _NAME,
            17,
            1700,
            "r1",
            1,
            listed,
            tensors,
            {"parent": 16},
            {"reward": 0.5, "x": "y"},
            ("candidate",),
        )
        found.append(manifest.to_json())
    return found


def _manifest(data: bytes) -> None:
    manifest = Manifest.from_json(data)
    assert Manifest.from_json(manifest.to_json()) == manifest
    _ = manifest.weight_files, manifest.nonfinite_elements


def _nodes() -> list[bytes]:
    leaf = Leaf({3: _entry(3), 5: _entry(5, retired_ms=1), 9: _entry(9, held=("x",))})
    inner = Inner(1, {0: NodeRef(node_name(3, "a" * 64), 0, 9, 2, 1)})
    return [history_nodes.to_json(each) for each in (leaf, inner)]


def _node(data: bytes) -> None:
    """A node whose parent says whatever agrees with it, as an attacker's does, or that of another one."""
    name = node_name(3, history_nodes.document_digests.digest_of(data))
    for ref in (NodeRef(name, 0, 9, 2, 1, 1), NodeRef(name, 1, 9, 2, 1)):
        with contextlib.suppress(DataLoss):
            history_nodes.from_json(data, ref, "node")


def _others(data: bytes) -> None:
    """All small documents: the first byte says which."""
    kind, data = data[:1], data[1:]
    match kind:
        case b"l":
            ListedTensors.decode(data, "it")
        case b"w":
            claim, written = Written.from_json(data, "it")
            written.to_json(claim)
        case b"r":
            ReplicaEntry.from_json(data, "it")
        case b"b":
            replica_exchange._batch_from_json(data, "it")
        case b"m":
            try:
                kept = json.loads(data)
            except (ValueError, RecursionError):
                return
            check_registration(_NAME, Head(files_id="f", registration=kept if isinstance(kept, dict) else {}))
            ModelTensors.from_json(kept)
        case _:
            strict_json.decode(data, "it").required(frozenset())


def _small_documents() -> list[bytes]:
    listed = ListedTensors.of(
        [TensorSpec("a.1.b", dtypes.parse("bf16"), (2, 3)), TensorSpec("a.10.b", dtypes.parse("fp32"), ())]
    )
    manifest = Manifest.from_json(_manifests()[0])
    home = Home("127.0.0.1:1", "boot")
    declarations = {rank: Declaration("client", "d" * 64, home) for rank in (0, 1)}
    registration = json.loads(_heads()[0])["registration"]
    return [
        b"l" + listed.encoded,
        b"w" + Written(dict(manifest.files), dict(manifest.tensors)).to_json("claim"),
        b"r" + ReplicaEntry(home, 5).to_json(),
        b"b" + replica_exchange._batch_to_json(home, declarations),
        b"m" + json.dumps(registration).encode(),
        b"s" + b'{"requires": [], "a": {"b": [1, 2.5, null, "x"]}}',
    ]


def _tagged(mutate: Mutator) -> Mutator:
    """Changes behind the first byte."""

    def changed(choose: random.Random, data: bytes) -> bytes:
        return (data[:1] if choose.random() < 0.98 else choose.randbytes(1)) + mutate(choose, data[1:])

    return changed


def _heavy(start: bytes = b"{") -> list[bytes]:
    """Documents of megabytes: nested, wide, and with long numbers and texts."""
    return [
        *(start + b'"x":' + part + b"}" for part in _LARGE),
        b"[" * 10_000_000,
        b'{"a":' * 1_000_000,
        b"9" * 5_000_000,
        b'"' + b"\\ud800" * 500_000 + b'"',
    ]


_LARGE = (
    b"[" + b"[]," * 700_000 + b"[]]",
    b"[" + b"{}," * 700_000 + b"{}]",
    b"[" * 900 + b"]" * 900,
    b"{" + b",".join(b'"%d":0' % n for n in range(200_000)) + b"}",
    b"9" * 4300,
    b"9" * 1_000_000,
    b"1e" + b"9" * 1_000_000,
    b"0." + b"1" * 1_000_000,
)

_FIELDS = (
    "format", "requires", "digest", "held-versions", "deleted", "listed-tensors", "candidate", "nonfinite", "approval", "held", "metadata", "extra",
    "level", "children", "entries", "recent", "removed", "root", "mark", "deletion", "gate", "parts", "weights", "files", "tensors", "nonfinite",
)  # fmt: skip
_SIGNED = mutators.json_documents(
    lambda text: with_digest(text[: text.rfind(b', "digest"')] + b"}" if b', "digest"' in text else text),
    _FIELDS,
)
_PLAIN = mutators.json_documents(texts=_FIELDS)
_BOUNDS = Bounds(seconds_per_mb=6.0)


def _target(
    name: str,
    parse: Callable[[bytes], object],
    samples: Callable[[], Sequence[bytes]],
    mutate: Mutator,
    heavy: Callable[[], list[bytes]],
) -> Target:
    return Target(name, stateless(parse), samples, mutate, (WeighbridgeError,), heavy, _BOUNDS, weight=0.25)


TARGETS = (
    _target("heads", _head, _heads, _SIGNED, _heavy),
    _target("manifests", _manifest, _manifests, _SIGNED, _heavy),
    _target("history-nodes", _node, _nodes, _PLAIN, lambda: _heavy(b'{"format":1,"requires":[],')),
    _target(
        "small-documents",
        _others,
        _small_documents,
        _tagged(_PLAIN),
        lambda: [b"s" + each for each in _heavy()],
    ),
)
