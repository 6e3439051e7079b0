"""Statement of a signature: the SHA-256 of each file of a version's folder, the manifest among them.

The manifest has the root of each file's digest tree and the version's origin, so these are signed too. Block digests
are not listed: the roots are digests of them. Format: predicate ``https://model_signing/signature/v1.0`` of in-toto
statements, as model-signing 1.1 writes it for whole files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from weighbridge._core.file_names import SIGNATURES_FOLDER
from weighbridge._core.manifest_text import BLOCKS_SUFFIX, MANIFEST_FILE, ManifestText
from weighbridge.errors import InvalidArgument

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"

_PASSED_OVER = (SIGNATURES_FOLDER, ".cache", ".git", ".gitattributes", ".github", ".gitignore")
"""Names that verifiers ignore, besides block digests: files that no loader reads, and files that downloads leave in a
folder.
"""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Statement:
    """The signed statement.

    Attributes:
        subject: the signer's name for it, ``namespace/name@number``; informative.
        sha256: SHA-256 of each file by name, as 64 hex digits.
        passed_over: names in the folder that a verifier ignores.
    """

    subject: str
    sha256: Mapping[str, str]
    passed_over: tuple[str, ...]

    @staticmethod
    def of_version(manifest: ManifestText, sha256: Mapping[str, str]) -> Statement:
        """The statement about a version.

        Args:
            manifest: the version's manifest.
            sha256: SHA-256 of the files for which the manifest has none.

        Raises:
            InvalidArgument: the digest of a file is missing.
        """
        found = {name: file.sha256 or sha256.get(name, "") for name, file in manifest.files.items()}
        missing = sorted(name for name, digest in found.items() if not _SHA256.fullmatch(digest))
        if missing:
            raise InvalidArgument(f"{manifest.title}: there is no SHA-256 of {_some(missing)}")
        blocks = (name + BLOCKS_SUFFIX for name in sorted(manifest.weights))
        return Statement(manifest.title, {**found, MANIFEST_FILE: manifest.sha256}, (*_PASSED_OVER, *blocks))

    @staticmethod
    def read(value: Any) -> Statement:
        """Parse the statement in a signature's payload, which is JSON.

        Raises:
            InvalidArgument: it is no statement about whole files by their SHA-256; the message says why.
        """
        try:
            if value["_type"] != STATEMENT_TYPE or value["predicateType"] != PREDICATE_TYPE:
                raise InvalidArgument(
                    f"it is not a statement of model signing 1.0, but {str(value['predicateType'])[:100]!r}"
                )
            (subject,) = value["subject"]
            serialization = value["predicate"]["serialization"]
            resources = value["predicate"]["resources"]
            if (serialization["method"], serialization["hash_type"]) != ("files", "sha256"):
                raise InvalidArgument(
                    f"it names {serialization['method']} by {serialization['hash_type']}"[:100],
                    fix="sign whole files by SHA-256, as model_signing does by default",
                )
            sha256 = {str(each["name"]): str(each["digest"]) for each in resources}
            if len(sha256) != len(resources) or not all(map(_SHA256.fullmatch, sha256.values())):
                raise InvalidArgument("it names a file twice, or without a SHA-256")
            if not all(map(str.isprintable, (str(subject["name"]), *sha256))):  # they go to logs and terminals
                raise InvalidArgument("it contains a name that cannot be printed")
            if {each["algorithm"] for each in resources} - {"sha256"}:
                raise InvalidArgument("it names files by digests other than SHA-256")
            statement = Statement(str(subject["name"]), sha256, tuple(map(str, serialization.get("ignore_paths", ()))))
            said = subject["digest"]["sha256"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(f"it is not a statement of model signing: {error!r}"[:300]) from error
        if said != statement.root:
            raise InvalidArgument("its digest does not match the files that it lists")
        return statement

    @property
    def root(self) -> str:
        """SHA-256 of the files' digests, in the order of their paths."""
        in_order = sorted(self.sha256, key=PurePosixPath)
        return hashlib.sha256(b"".join(bytes.fromhex(self.sha256[name]) for name in in_order)).hexdigest()

    def contradictions(self, manifest: ManifestText) -> list[str]:
        """Differences between the statement and a version; empty if the statement is about the version.

        A file without SHA-256 in the manifest is compared by name: the manifest, whose digest is signed, has another
        digest of it.
        """
        if self.sha256.get(MANIFEST_FILE) != manifest.sha256:
            about = f": it is about {self.subject[:200]}" if self.subject != manifest.title else ""
            what = "lists no" if MANIFEST_FILE not in self.sha256 else "has a different"
            return [f"it {what} {MANIFEST_FILE}{about}"]
        wanted, listed = manifest.files.keys() | {MANIFEST_FILE}, self.sha256.keys()
        other = [
            name
            for name, file in manifest.files.items()
            if file.sha256 and name in listed and file.sha256 != self.sha256[name]
        ]
        passed_over = {*map(PurePosixPath, self.passed_over)}  # may be as many as fit into a signature
        hidden = [
            name
            for name in sorted(wanted)
            if not passed_over.isdisjoint((PurePosixPath(name), *PurePosixPath(name).parents))
        ]
        return [
            *([f"it does not list {_some(wanted - listed)}"] if wanted - listed else []),
            *([f"it lists {_some(listed - wanted)}, which the version does not have"] if listed - wanted else []),
            *([f"it has a different SHA-256 of {_some(other)}"] if other else []),
            *([f"it ignores {_some(hidden)}"] if hidden else []),
        ]


def _some(names: Any) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(name[:100] for name in ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
