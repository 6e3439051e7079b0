"""Keys and authorities of signers, as OpenSSL makes them, and the stock command line of model-signing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.forked import ForkedPython


@dataclass(frozen=True)
class KeyFiles:
    """Files of a key.

    Attributes:
        key: the private key.
        public: the public key.
        certificate: the certificate of one that an authority has issued.
    """

    key: Path
    public: Path
    certificate: Path = Path()


def write_key(folder: Path, private: PrivateKeyTypes, name: str = "key", password: str = "") -> KeyFiles:
    folder.mkdir(parents=True, exist_ok=True)
    files = KeyFiles(folder / f"{name}.pem", folder / f"{name}.pub.pem")
    protection = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    files.key.write_bytes(
        private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    )
    files.public.write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return files


def new_key(folder: Path, name: str = "key", *, curve: ec.EllipticCurve | None = None, password: str = "") -> KeyFiles:
    """A new key on P-256, or another curve."""
    return write_key(folder, ec.generate_private_key(curve or ec.SECP256R1()), name, password)


class SigningAuthority:
    """An authority that issues certificates for signing.

    Args:
        folder: folder for the files of certificates.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / f"{name}.pem"
        day = timedelta(days=1)
        builder = self._builder(self._name, self._key.public_key(), datetime.now(UTC) - 1000 * day, 2000 * day)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days_ago: float = 1, days: float = 30) -> KeyFiles:
        """A key with a certificate that is valid for so many days from some days ago on."""
        private = ec.generate_private_key(ec.SECP256R1())
        files = write_key(self._folder, private, name)
        begin = datetime.now(UTC) - timedelta(days=days_ago)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, private.public_key(), begin, timedelta(days=days))
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
        certificate = builder.add_extension(usage, critical=False).sign(self._key, hashes.SHA256())
        path = self._folder / f"{name}.cert.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return KeyFiles(files.key, files.public, path)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, length: timedelta
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + length)
        )


def model_signing(*line: str | Path) -> tuple[int, str]:
    """Run the stock command line of model-signing; its exit code, and what it says."""
    with tempfile.TemporaryFile("w+") as errors:
        process = ForkedPython("-m", "model_signing", *map(str, line), stderr=errors.fileno())
        said, _ = process.communicate(timeout=60)
        errors.seek(0)
        return process.wait(), said + errors.read()


def stock_verify(folder: Path, signature: Path, public: Path, *options: str) -> tuple[bool, str]:
    """Whether the stock command line finds a folder to be what a key has signed, and what it says."""
    code, said = model_signing("verify", "key", folder, "--signature", signature, "--public_key", public, *options)
    return code == 0, said


def signature_of(folder: Path) -> Path:
    """The only signature of an exported folder."""
    (found,) = _signatures(folder)
    return found


def _signatures(folder: Path) -> Iterable[Path]:
    return (folder / "signatures").iterdir()
