"""Adapter of model-signing: its signers and verifiers over digests that are known already, so that no file is read.

The library lets callers configure how a folder is hashed; the configuration here returns the digests of a statement.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from model_signing import hashing, manifest, signing, verifying
from model_signing._hashing.hashing import Digest

from weighbridge._signing.in_memory import in_memory
from weighbridge._signing.statement import Statement


class _Known(hashing.Config):
    """Hashing configuration that returns known digests."""

    def __init__(self, statement: Statement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._statement = statement

    def hash(
        self, model_path: hashing.PathLike, *, files_to_hash: Iterable[hashing.PathLike] | None = None
    ) -> manifest.Manifest:
        """The digests of the statement; the path is ignored."""
        kind = manifest.SerializationType.from_args(
            {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(self._statement.passed_over),
            }
        )
        items = [
            manifest.FileManifestItem(path=PurePosixPath(name), digest=Digest("sha256", bytes.fromhex(digest)))
            for name, digest in self._statement.sha256.items()
        ]
        return manifest.Manifest(self._statement.subject, items, kind)


def sign(statement: Statement, key: bytes, certificates: tuple[bytes, ...]) -> bytes:
    """Sign a statement.

    Args:
        statement: the statement.
        key: the private key, as PEM text without encryption.
        certificates: the key's certificate and its chain, as PEM text; empty to sign with the key alone.
    """
    config = signing.Config().set_hashing_config(_Known(statement))
    with in_memory(key) as key_file, in_memory() as out:
        if certificates:
            # the library requires a chain; the key's own certificate adds nothing to it, and does no harm
            others = certificates[1:] or certificates[:1]
            with in_memory(certificates[0]) as own, in_memory(b"".join(others)) as chain:
                config.use_certificate_signer(private_key=key_file, signing_certificate=own, certificate_chain=[chain])
        else:
            config.use_elliptic_key_signer(private_key=key_file)
        config.sign(Path(statement.subject), out)
        return out.read_bytes()


def verify_by_key(statement: Statement, content: bytes, public_key: bytes) -> None:
    """Raise model-signing's error if this is no signature of a statement by a key.

    Args:
        statement: the statement that should be signed.
        content: the signature.
        public_key: the key, as PEM text.
    """
    with in_memory(public_key) as key:
        _verify(verifying.Config().use_elliptic_key_verifier(public_key=key), statement, content)


def verify_by_authorities(statement: Statement, content: bytes, authorities: bytes) -> None:
    """Raise model-signing's error if this is no signature of a statement by a certificate of one of these authorities.

    Args:
        statement: the statement that should be signed.
        content: the signature.
        authorities: the authorities' certificates, as PEM text.
    """
    with in_memory(authorities) as chain:
        _verify(verifying.Config().use_certificate_verifier(certificate_chain=[chain]), statement, content)


def _verify(config: verifying.Config, statement: Statement, content: bytes) -> None:
    with in_memory(content) as signature:
        config.set_hashing_config(_Known(statement)).verify(Path(statement.subject), signature)
