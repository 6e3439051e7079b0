"""Comparison of a durable version's files with its manifest, in one pass over each file.

XXH3-128 identifies the damaged files and tensors; the block digests locate the damaged bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weighbridge._core.layouts import TensorSpec
from weighbridge._core.resources import Verification
from weighbridge.errors import NotFound, Unavailable, WeighbridgeError
from weighbridge_storage.documents.names import BLOCKS_SUFFIX, ModelName, blocks_key, version_key
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.digests import BLOCK_BYTES, DIGEST_BYTES, FileDigester, FileDigests, root_of
from weighbridge_storage.versions.manifest import Manifest, TensorEntry
from weighbridge_storage.versions.reading import read_manifest, tensors_of_files


def verify_version(
    store: ObjectStore,
    model: ModelName,
    number: int,
    *,
    sha256: bool = False,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Verification:
    """Read all files of a durable version once, and compare them with its manifest.

    Args:
        store: store of the version.
        model: the model.
        number: number of the version.
        sha256: whether to also compute the SHA-256 of all files. It is compared if the manifest contains it.
        on_progress: called with the number of bytes read so far.

    Raises:
        DataLoss: the manifest itself is missing or malformed.
        Unavailable: the store is unreachable.
    """
    manifest = read_manifest(store, model, number)
    in_file = tensors_of_files(manifest)
    problems: list[str] = []
    found_sha256: dict[str, str] = {}
    done = checked = read = 0

    def took(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        on_progress(read)

    for name, file in manifest.files.items():
        key = version_key(model, number, name)
        tensors = in_file.get(name, ())
        try:
            size = store.size(key)
            if size != file.size:
                problems.append(f"{name} has {size} bytes instead of {file.size}")
                continue
            found = digest_object(store, key, name, tensors, took, sha256=sha256)
        except Unavailable:
            raise  # does not mean that the file is damaged
        except WeighbridgeError as error:
            problems.append(f"{name}: {error.message}")
            continue
        problems += _differing_digests(manifest, name, found)
        if tensors:
            try:
                blocks = store.get(blocks_key(model, number, name))[0]
            except NotFound:
                problems.append(f"{name}{BLOCKS_SUFFIX} is missing from the store")
            except Unavailable:
                raise
            except WeighbridgeError as error:
                problems.append(f"{name}{BLOCKS_SUFFIX}: {error.message}")
            else:
                problems += _differing_blocks(manifest, name, found, blocks)
        if sha256:
            found_sha256[name] = found.entry.sha256
        checked += len(tensors)
        done += file.size
    return Verification(number, checked, done, tuple(problems), manifest.nonfinite_elements, found_sha256)


def digest_object(
    store: ObjectStore,
    key: str,
    name: str,
    tensors: Sequence[tuple[str, TensorEntry]],
    took: Callable[[int], None] = lambda _nbytes: None,
    *,
    sha256: bool = False,
) -> FileDigests:
    """The digests of a file in a store.

    Args:
        store: the store.
        key: key of the file.
        name: name of the file.
        tensors: tensors in it.
        took: called after each piece with its number of bytes.
        sha256: whether to also compute its SHA-256.

    Raises:
        NotFound: the file does not exist.
    """
    spans = [(TensorSpec(t, e.dtype, e.shape), e.offset) for t, e in tensors]
    digester = FileDigester(name, spans, sha256=sha256)
    for piece in store.stream(key):
        view = memoryview(piece)
        digester.update(view)
        took(len(view))
    return digester.finish()


def _differing_digests(manifest: Manifest, name: str, found: FileDigests) -> list[str]:
    problems = [
        f"tensor {tensor} in {name} does not agree with its digest"
        for tensor, entry in found.tensors.items()
        if entry.xxh3_128 != manifest.tensors[tensor].xxh3_128
    ]
    there, file = found.entry, manifest.files[name]
    other_sha256 = there.sha256 and file.sha256 and there.sha256 != file.sha256
    if (there.xxh3_128, there.blake3) != (file.xxh3_128, file.blake3) or other_sha256:
        problems.append(f"{name} does not agree with its digest")
    return problems


def _differing_blocks(manifest: Manifest, name: str, found: FileDigests, stored: bytes) -> list[str]:
    file = manifest.files[name]
    if len(stored) != len(found.blocks) or root_of(stored) != file.blake3:
        return [f"{name}{BLOCKS_SUFFIX} does not agree with the manifest"]
    starts = range(0, len(stored), DIGEST_BYTES)
    damaged = [
        start // DIGEST_BYTES
        for start in starts
        if stored[start : start + DIGEST_BYTES] != found.blocks[start : start + DIGEST_BYTES]
    ]
    if not damaged:
        return []
    first = damaged[0] * BLOCK_BYTES
    end = min(first + BLOCK_BYTES, file.size)
    return [f"{name} is damaged between bytes {first} and {end}; {len(damaged)} of its {len(starts)} blocks are"]
