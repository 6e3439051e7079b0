"""Names of models, refs, files and versions, and their keys in a store.

A name that passes these checks is safe as one component of a path, of a URL and of an object key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

from weighbridge._core.file_names import ALLOWED, SIGNATURES_FOLDER, folders_of, is_component, is_file_name
from weighbridge._core.references import TRAINING
from weighbridge._core.resources import REF_LATEST, REF_LIVE
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument

MANIFEST_FILE = "weighbridge.json"
BLOCKS_SUFFIX = ".blake3"
"""Suffix of the name of a file's block digests. They do not count as a file of the version."""
HEAD_FILE = "head.json"
REPLICAS = "replicas/"
"""Prefix of the keys with which replicas of the service find each other."""
RESERVED_REFS = frozenset({REF_LATEST, REF_LIVE})
"""Refs that the service moves."""
MAX_VERSION = 10**12 - 1
"""Version folders have names of twelve digits, so that they sort by number."""

NUMBERED_FOLDERS = ("versions", "incoming", "leases", "signatures")
"""Folders of a model that contain a folder for each version. In order, they contain its files, its state while it is
received, the leases of its readers, and its signatures.
"""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NODE = re.compile(r"([0-9]{16,19})-[0-9a-f]{64}")
_NUMBER = re.compile(r"(?!0{12})[0-9]{12}")
_PART = "[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
MODEL_PART_PATTERN = rf"^(?!.*--)(?!.*\.\.)(?!.*\.git$){_PART}$"
"""Pattern of either half of a model's name, for JSON Schema and regular expressions."""
MODEL_NAME_PATTERN = rf"^(?!.*--)(?!.*\.\.)(?!.*\.git(?::|$)){_PART}(?::{TRAINING})?$"
"""Pattern of the second half, optionally followed by the part of the model."""
MODEL_PATTERN = rf"^(?!.*--)(?!.*\.\.)(?!.*\.git(?:[/:]|$)){_PART}/{_PART}(?::{TRAINING})?$"
"""Pattern of the name of a model or of a part of it."""
REF_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
"""Pattern of refs; version numbers match it too."""
REQUEST_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
"""Pattern of the identifier of a request to change a ref."""

_MODEL_PART = re.compile(MODEL_PART_PATTERN)
_TWO_PARTS = re.compile(r"[^/]*/[^/]*")
_REF = re.compile(REF_PATTERN)
_REQUEST = re.compile(REQUEST_PATTERN)
_GIVER_DIGITS = 16


def _is(pattern: re.Pattern[str], value: object) -> bool:
    """Whether ``value`` is a string and all of it matches. A value from JSON may have another type."""
    return isinstance(value, str) and pattern.fullmatch(value) is not None


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """Name of a model, ``namespace/name``, or of a part of a model, ``namespace/name:training``.

    An instance is always valid.

    The rules are those of the Hugging Face Hub: 1 to 96 letters, digits, ``-``, ``_`` or ``.`` each, not starting
    or ending with ``-`` or ``.``, without ``--`` and ``..``, not ending with ``.git``.

    Attributes:
        part: `TRAINING` for the training states of the model; empty for the model itself, whose versions are its
            weights.

    Raises:
        InvalidArgument: a half violates the rules (the message names it), or the part does not exist.
    """

    namespace: str
    name: str
    part: str = ""

    def __post_init__(self) -> None:
        for what, part in (("namespace", self.namespace), ("name", self.name)):
            if not _is(_MODEL_PART, part):
                raise InvalidArgument(
                    f"{shown(part)} is not a valid {what} of a model",
                    fix="use 1 to 96 letters, digits, '-', '_' or '.', not starting or ending with '-' or '.', "
                    "without '--' or '..', not ending with '.git'",
                )
        if self.part not in ("", TRAINING):
            raise InvalidArgument(
                f"{shown(self.part)} is not a part of a model",
                fix=f"the only part that a model may have is {self.namespace}/{self.name}:{TRAINING}",
            )

    @staticmethod
    def parse(text: str) -> ModelName:
        """Parse the name of a model, e.g. ``acme/smol``, or of a part of a model, e.g. ``acme/smol:training``.

        Raises:
            InvalidArgument: the number of slashes is not one, or a half violates the rules.
        """
        if not _is(_TWO_PARTS, text):
            raise InvalidArgument(
                f"{shown(text)} is not a model name", fix="write it as namespace/name, e.g. acme/smol"
            )
        namespace, second = text.split("/")
        name, colon, part = second.partition(":")
        if colon and not part:
            raise InvalidArgument(f"{shown(text)} does not name a part of the model", fix=f"write {namespace}/{name}")
        return ModelName(namespace, name, part)

    @property
    def model(self) -> ModelName:
        """The model that a part belongs to; the name itself if it is not a part."""
        return ModelName(self.namespace, self.name)

    @property
    def training(self) -> ModelName:
        """The part that contains the model's training states."""
        return ModelName(self.namespace, self.name, TRAINING)

    @property
    def second(self) -> str:
        """The name after the slash: ``smol``, or ``smol:training``."""
        return f"{self.name}:{self.part}" if self.part else self.name

    @property
    def prefix(self) -> str:
        """Prefix of the keys of all of its objects: ``models/acme/smol/``, or ``training/acme/smol/``."""
        return f"{self.part or 'models'}/{self.namespace}/{self.name}/"

    @property
    def head_key(self) -> str:
        """Key of the model's head."""
        return self.prefix + HEAD_FILE

    def __str__(self) -> str:
        return f"{self.namespace}/{self.second}"


def ledger_key(namespace: str) -> str:
    """Key of the ledger of a namespace, e.g. ``service/stored/acme.json``. Raises InvalidArgument."""
    return f"service/stored/{ModelName(namespace, 'any').namespace}.json"


def version_prefix(model: ModelName, number: int) -> str:
    """Prefix of the keys of a version's objects, e.g. ``models/acme/smol/versions/000000000017/``.

    Raises:
        InvalidArgument: ``number`` is not from 1 to `MAX_VERSION`.
    """
    return _numbered_prefix(model, "versions", number)


def lease_key(model: ModelName, number: int, reader: str) -> str:
    """Key of the lease with which a reader prevents the deletion of a version's objects.

    Raises:
        InvalidArgument: ``number`` is not from 1 to `MAX_VERSION`, or the reader's name is not of 1 to 128 letters,
            digits, ``-``, ``_`` or ``.``.
    """
    return _numbered_prefix(model, "leases", number) + check_component(reader)


def signatures_prefix(model: ModelName, number: int) -> str:
    """Prefix of the keys of a version's signatures, e.g. ``models/acme/smol/signatures/000000000017/``.

    Raises:
        InvalidArgument: ``number`` is not from 1 to `MAX_VERSION`.
    """
    return _numbered_prefix(model, "signatures", number)


def signature_key(model: ModelName, number: int, digest: str) -> str:
    """Key of a signature, e.g. ``models/acme/smol/signatures/000000000017/<digest>.sig``.

    Args:
        model: model of the signed version.
        number: number of the version.
        digest: SHA-256 of the signature, as 64 hex digits.

    Raises:
        InvalidArgument: ``number`` is not from 1 to `MAX_VERSION`, or ``digest`` is not a SHA-256.
    """
    if not _is(_SHA256, digest):
        raise InvalidArgument(f"{shown(digest)} is not the SHA-256 of a signature")
    return f"{signatures_prefix(model, number)}{digest}.sig"


def digest_of_signature(key: str) -> str | None:
    """The digest in the key of a signature; None for other keys."""
    digest = key.rpartition("/")[2].removesuffix(".sig")
    return digest if key.endswith(f"/{digest}.sig") and _is(_SHA256, digest) else None


def signature_giver_key(model: ModelName, number: int, digest: str, by: str) -> str:
    """Key of the record of an identity that added a signature, e.g.
    ``models/acme/smol/signatures/000000000017/<digest>.by-<digits>``.

    Args:
        model: model of the signed version.
        number: number of the version.
        digest: as in `signature_key`.
        by: name of the identity. The key contains the first 16 hex digits of its SHA-256.

    Raises:
        InvalidArgument: as `signature_key`.
    """
    giver = hashlib.sha256(by.encode()).hexdigest()[:_GIVER_DIGITS]
    return f"{signature_key(model, number, digest).removesuffix('.sig')}.by-{giver}"


def numbered_key(model: ModelName, key: str) -> tuple[str, int] | None:
    """Folder of `NUMBERED_FOLDERS` and version number of an object; None if the object is not in such a folder."""
    folder, _, rest = key.removeprefix(model.prefix).partition("/")
    number, slash, _ = rest.partition("/")
    if not key.startswith(model.prefix) or folder not in NUMBERED_FOLDERS or not slash:
        return None
    return (folder, int(number)) if _NUMBER.fullmatch(number) else None


def _numbered_prefix(model: ModelName, folder: str, number: int) -> str:
    if not 1 <= number <= MAX_VERSION:
        raise InvalidArgument(f"{shown(number)} is not a version number", fix=f"versions are 1 to {MAX_VERSION}")
    return f"{model.prefix}{folder}/{number:012d}/"


def incoming_prefix(model: ModelName, number: int) -> str:
    """Prefix of the keys with which replicas of the service coordinate a version that they receive together.

    Raises:
        InvalidArgument: ``number`` is not from 1 to `MAX_VERSION`.
    """
    return _numbered_prefix(model, "incoming", number)


def layout_key(model: ModelName, digest: str, first_version: int = 1) -> str:
    """Key of a layout that a rank declared to one replica of the service. The other replicas read the layout there.

    Args:
        model: the model.
        digest: digest of the layout.
        first_version: as in `files_id_of`.

    Raises:
        InvalidArgument: ``digest`` cannot be part of a key.
    """
    return f"{model.prefix}layouts/{files_id_of(first_version, check_component(digest))}"


def replica_key(boot: str) -> str:
    """Key of the directory entry of a replica of the service, e.g. ``replicas/<boot>``.

    Raises:
        InvalidArgument: the boot is not of 1 to 128 letters, digits, ``-``, ``_`` or ``.``.
    """
    return REPLICAS + check_component(boot)


def tensor_list_key(model: ModelName, digest: str, first_version: int = 1) -> str:
    """Key of a registered list of a model's tensors, e.g. ``models/acme/smol/tensors/<digest>.json``.

    Args:
        model: the model.
        digest: digest of the list.
        first_version: as in `files_id_of`.

    Raises:
        InvalidArgument: ``digest`` cannot be part of a key.
    """
    return f"{model.prefix}tensors/{files_id_of(first_version, check_component(digest))}.json"


def files_id_of(first_version: int, digest: str) -> str:
    """Name of the folder of registered files.

    It changes when a model is deleted and registered again, so that files of the deleted model can be identified and
    deleted at any time.

    Args:
        first_version: the lowest number that a version can have since the model was registered.
        digest: digest of the files.
    """
    return digest if first_version == 1 else f"{first_version}-{digest}"


def first_version_of(files_id: str) -> int:
    """The ``first_version`` of `files_id_of`."""
    first, dash, _ = files_id.partition("-")
    return int(first) if dash and first.isascii() and first.isdigit() else 1


def registered_files_of(model: ModelName, key: str) -> int | None:
    """The ``first_version`` of `files_id_of` in the key of a registered file, list of tensors or layout; None for other
    keys.
    """
    if not key.startswith(model.prefix):
        return None
    match key.removeprefix(model.prefix).split("/"):
        case ["files", files_id, _, *_]:
            return first_version_of(files_id)
        case ["tensors" | "layouts", name]:
            return first_version_of(name)
    return None


def node_name(generation: int, digest: str) -> str:
    """Name of a node of a model's history (`weighbridge_storage.head.history_nodes`).

    Args:
        generation: generation of the head for which the node is written.
        digest: digest of its text, 64 hexadecimal digits.
    """
    return check_node_name(f"{generation:016d}-{digest}")


def check_node_name(name: str) -> str:
    """Returns ``name`` if a node of a model's history may have it. Otherwise raises InvalidArgument."""
    if not _is(_NODE, name):
        raise InvalidArgument(f"{shown(name)} is not a valid name of a history node")
    return name


def node_key(model: ModelName, name: str) -> str:
    """Key of a node of a model's history, e.g. ``models/acme/smol/history/<name>.json``. Raises InvalidArgument."""
    return f"{model.prefix}history/{check_node_name(name)}.json"


def node_of_key(model: ModelName, key: str) -> tuple[str, int] | None:
    """Name and generation of the history node with a key; None if the key does not belong to a node."""
    name = key.removeprefix(f"{model.prefix}history/").removesuffix(".json")
    found = _NODE.fullmatch(name)
    return (name, int(found[1])) if found and key == node_key(model, name) else None


def version_key(model: ModelName, number: int, file_name: str) -> str:
    """Key of one file of a version.

    Raises:
        InvalidArgument: no version can have this number, or no file this name.
    """
    return version_prefix(model, number) + check_version_file_name(file_name)


def blocks_key(model: ModelName, number: int, file_name: str) -> str:
    """Key of the block digests of one file of a version.

    Raises:
        InvalidArgument: no version can have this number, or no file this name.
    """
    return version_key(model, number, file_name + BLOCKS_SUFFIX)


def check_ref_name(name: str) -> str:
    """Returns ``name`` if a caller may set a ref of this name: 1 to 64 letters, digits, ``-``, ``_`` or ``.``.

    Raises:
        InvalidArgument: it is malformed, reads like a version number, or is a ref that the service moves
            (`RESERVED_REFS`).
    """
    if not _is(_REF, name):
        raise InvalidArgument(
            f"{shown(name)} is not a valid ref name",
            fix="use 1 to 64 letters, digits, '-', '_' or '.', not starting with '-' or '.'",
        )
    if name.isdigit():
        raise InvalidArgument(
            f"{shown(name)} is not a valid ref name: it looks like a version number",
            fix=f"add a letter, e.g. v{name}",
        )
    if name in RESERVED_REFS:
        raise InvalidArgument(
            f"the ref {name!r} moves automatically as versions become visible",
            fix="give the version a tag, such as prod, and let engines follow that",
        )
    return name


def check_request_id(request_id: str) -> str:
    """Returns ``request_id`` if it consists of 1 to 64 letters, digits, ``-`` or ``_``.

    Otherwise raises InvalidArgument.
    """
    if not _is(_REQUEST, request_id):
        raise InvalidArgument(
            f"{shown(request_id)} is not a valid request ID",
            fix="use 1 to 64 letters, digits, '-' or '_', such as a UUID",
        )
    return request_id


def check_component(name: str) -> str:
    """Returns ``name`` if it can be one component of a key: 1 to 128 letters, digits, ``-``, ``_`` or ``.``.

    Raises:
        InvalidArgument: it is malformed, or starts with ``-`` or ``.``.
    """
    if not is_component(name):
        raise InvalidArgument(
            f"{shown(name)} is not a valid file name",
            fix="use 1 to 128 letters, digits, '-', '_' or '.', not starting with '-' or '.', and no folders",
        )
    return name


def check_version_file_name(name: str) -> str:
    """Returns ``name`` if a file of a version may have it: a path within the version's folder, as in `is_file_name`.

    Raises:
        InvalidArgument: it is malformed, or a component starts with ``-`` or ``.``.
    """
    if not is_file_name(name):
        raise InvalidArgument(f"{shown(name)} is not a valid file name", fix=f"use {ALLOWED}")
    return name


def check_files_id(files_id: str) -> str:
    """Returns ``files_id`` if it can name the folder of registered files: one component of a key, or empty if no files
    are registered.

    Raises:
        InvalidArgument: it is malformed.
    """
    if files_id and not is_component(files_id):
        raise InvalidArgument(f"files_id is {shown(files_id)}, which is not a valid folder name")
    return files_id


def check_file_name(name: str) -> str:
    """Returns ``name`` if a file that belongs to a model (config, tokenizer) may have it.

    Raises:
        InvalidArgument: as `check_version_file_name`, or the service writes a file of this name.
    """
    check_version_file_name(name)
    lowered = name.lower()
    if (
        lowered == MANIFEST_FILE
        or lowered.startswith(f"{SIGNATURES_FOLDER}/")
        or lowered.endswith((".safetensors", ".safetensors.index.json", BLOCKS_SUFFIX))
    ):
        raise InvalidArgument(
            f"{shown(name)} cannot be pushed with a model: the service writes it", fix="leave this file out"
        )
    return name


def check_file_names(names: Collection[str]) -> None:
    """Raise InvalidArgument for names that the files of one model cannot have together.

    Raises:
        InvalidArgument: as `check_file_name`, or a file has the name of a folder that contains another file.
    """
    for name in names:
        check_file_name(name)
    for name in folders_of(names) & set(names):
        raise InvalidArgument(
            f"{name} is both a file and a folder that contains another file", fix="rename one of them"
        )
