"""Signatures beside a client: signs versions, and checks their signatures."""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge._clients.client import Client
from weighbridge._core.resources import Verification
from weighbridge._signing import steps
from weighbridge._signing.checking import Signed
from weighbridge._signing.signer import Signer
from weighbridge._signing.steps import Signing
from weighbridge._signing.trust import Trusted

__all__ = ["Signatures"]


class Signatures:
    """Signatures of versions; `Client.signatures` reads them. Safe to use from several threads.

    Args:
        client: client of the service; the caller closes it.

    Examples:
        >>> signatures = Signatures(client)
        >>> signing = signatures.sign("acme/smol@1", signer=Signer(keys.key))
        >>> signed = signatures.check("acme/smol@1", required=[Trusted.of_file(keys.public)])
        >>> signing.method, signed[0].id == signing.id
        ('key', True)
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection = client._connection

    def __repr__(self) -> str:
        return f"<Signatures beside {self._client!r}>"

    def sign(self, model: str, version: str | int | None = None, *, signer: Signer) -> Signing:
        """Sign a version: its files, and its manifest, which includes its origin. Repeating it is harmless.

        The private key stays in this process. If the manifest lacks the SHA-256 of files, the service reads all files
        once, and compares them with the manifest.

        Args:
            model: the model.
            version: a number or a ref; by default the latest.
            signer: the signer.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is not durable yet, or was taken out of history.
            DataLoss: its files do not match its manifest.
            ResourceExhausted: it has as many signatures as a version may have.
        """
        return self._connection.run(steps.sign(model, version, signer))

    def add(self, model: str, version: str | int | None = None, *, content: bytes) -> Signing:
        """Add a signature that was made elsewhere to a version, as by ``model_signing sign pkcs11-key`` in the folder
        of a download.

        Raises:
            InvalidArgument: it is no signature, or not about this version.
            NotFound, FailedPrecondition, ResourceExhausted: as `sign`.
        """
        return self._connection.run(steps.add_signature(model, version, content))

    def check(self, model: str, version: str | int | None = None, *, required: Sequence[Trusted]) -> tuple[Signed, ...]:
        """Check that a version is signed by all that are required. The signatures are bound to this version by its
        manifest. Its weights are not read.

        Args:
            model: the model.
            version: a number or a ref; by default the latest.
            required: the requirements, each of which must be satisfied.

        Returns:
            For each of these, a signature that satisfies it.

        Raises:
            FailedPrecondition: one is not satisfied; ``details`` gives the reason for each signature. Or the version is
                not durable.
            NotFound: no such model or version.
            DataLoss: the service returned another version's manifest.
        """
        return self._connection.run(steps.check_signed(model, version, required))

    def verify(
        self, model: str, version: str | int | None = None, *, required: Sequence[Trusted]
    ) -> tuple[Verification, tuple[Signed, ...]]:
        """As `check`, and let the service compare the version's files with the signed digests, as `Client.verify` does
        with the manifest.
        """
        return self._connection.run(steps.verify_signed(model, version, required))
