"""Do keys and certificates sign and verify as model-signing has it, and is every wrong one refused with what to do?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.sdk.signing.test_statements import bundle, manifest, statement
from tests.support.signing import KeyFiles, SigningAuthority, new_key, write_key
from weighbridge import Signature, Signer, Trusted
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.checking import check_signed
from weighbridge._signing.signer import PasswordNeeded, has_signed, sign
from weighbridge._signing.trust import check
from weighbridge.errors import FailedPrecondition, InvalidArgument

VERSION = manifest()
STATEMENT = statement(VERSION)


def signed(signer: Signer) -> Bundle:
    return Bundle.read(sign(signer, STATEMENT))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_a_key_signs_and_its_public_key_verifies(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    files = new_key(tmp_path, curve=curve)
    found = signed(Signer(files.key))
    assert (found.method, found.statement) == ("key", STATEMENT)
    assert check(Trusted.of_file(files.public), found) == f"key {found.signer[:16]}"


def test_a_certificate_signs_and_its_authority_verifies(tmp_path: Path) -> None:
    authority = SigningAuthority(tmp_path)
    files = authority.issue("release")
    found = signed(Signer(files.key, certificate=files.certificate))
    assert found.method == "certificate"
    assert check(Trusted.of_file(authority.ca), found) == "certificate CN=release"


def test_a_file_may_hold_several_keys_and_authorities_of_which_one_is_enough(tmp_path: Path) -> None:
    old, new = new_key(tmp_path, "old"), new_key(tmp_path, "new")
    authority = SigningAuthority(tmp_path)
    both = tmp_path / "trusted.pem"
    both.write_bytes(old.public.read_bytes() + b"a note\n" + new.public.read_bytes() + authority.ca.read_bytes())
    issued = authority.issue("ci")
    trusted = Trusted.of_file(both)
    for signer in (Signer(old.key), Signer(new.key), Signer(issued.key, certificate=issued.certificate)):
        assert check(trusted, signed(signer))


def test_each_requirement_must_be_satisfied_by_a_signature(tmp_path: Path) -> None:
    release, ci = new_key(tmp_path, "release"), new_key(tmp_path, "ci")
    required = [Trusted.of_file(release.public), Trusted.of_file(ci.public)]
    by_release, by_ci = (signed(Signer(each.key)) for each in (release, ci))
    found = check_signed(VERSION, [by_release.as_signature, by_ci.as_signature], required)
    assert [each.id for each in found] == [by_release.id, by_ci.id]
    with pytest.raises(FailedPrecondition, match=r"ci\.pub\.pem requires: none of its signatures is accepted"):
        check_signed(VERSION, [by_release.as_signature], required)
    with pytest.raises(FailedPrecondition, match="it has no signature"):
        check_signed(VERSION, [], required)


def test_a_signature_of_another_version_does_not_count_whoever_made_it(tmp_path: Path) -> None:
    files = new_key(tmp_path)
    required = [Trusted.of_file(files.public)]
    other = manifest(version=16)
    content = sign(Signer(files.key), statement(other))
    with pytest.raises(FailedPrecondition) as refused:
        check_signed(VERSION, [Bundle.read(content).as_signature], required)
    assert "it is about acme/smol@16" in refused.value.details[0]
    assert check_signed(other, [Bundle.read(content).as_signature], required)


def changed(content: bytes) -> bytes:
    """A signature under which another statement was put."""
    other = json.loads(bundle(statement(manifest(step=301))))["dsseEnvelope"]["payload"]
    found = json.loads(content)
    found["dsseEnvelope"]["payload"] = other
    return json.dumps(found).encode()


def test_a_statement_that_was_changed_after_signing_does_not_count(tmp_path: Path) -> None:
    files = new_key(tmp_path)
    found = Bundle.read(changed(signed(Signer(files.key)).content))
    with pytest.raises(InvalidArgument, match="it is invalid"):
        check(Trusted.of_file(files.public), found)
    authority = SigningAuthority(tmp_path)
    issued = authority.issue("release")
    by_certificate = signed(Signer(issued.key, certificate=issued.certificate))
    with pytest.raises(InvalidArgument, match="it is invalid"):
        check(Trusted.of_file(authority.ca), Bundle.read(changed(by_certificate.content)))


def test_other_keys_and_authorities_do_not_count(tmp_path: Path) -> None:
    files, other = new_key(tmp_path, "one"), new_key(tmp_path, "other")
    mine, theirs = SigningAuthority(tmp_path, "mine"), SigningAuthority(tmp_path, "theirs")
    issued = theirs.issue("release")
    by_key, by_certificate = (
        signed(Signer(files.key)),
        signed(Signer(issued.key, certificate=issued.certificate)),
    )
    for trusted, found, reason in (
        (other.public, by_key, f"with the key {by_key.signer[:16]}, which is not in"),
        (mine.ca, by_key, "which is not in"),
        (mine.ca, by_certificate, "it is invalid: .*unable to get"),
        (other.public, by_certificate, "holds no authority"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            check(Trusted.of_file(trusted), found)


def test_a_signature_that_names_a_key_falsely_does_not_count(tmp_path: Path) -> None:
    files, other = new_key(tmp_path, "one"), new_key(tmp_path, "other")
    found = json.loads(signed(Signer(other.key)).content)
    found["verificationMaterial"]["publicKey"]["hint"] = signed(Signer(files.key)).signer
    with pytest.raises(InvalidArgument, match="it is invalid"):
        check(Trusted.of_file(files.public), Bundle.read(json.dumps(found).encode()))


def test_a_certificate_counts_from_its_first_to_its_last_day(tmp_path: Path) -> None:
    authority = SigningAuthority(tmp_path)
    expired, early = authority.issue("old", days_ago=60, days=30), authority.issue("early", days_ago=-2)
    for files, reason in ((expired, "expired on"), (early, "is valid from")):
        with pytest.raises(InvalidArgument, match=reason):
            Signer(files.key, certificate=files.certificate)
    # one that was valid when it signed, and is not any more
    found = json.loads(signed(Signer(expired.key)).content)
    der = b"".join(expired.certificate.read_bytes().splitlines()[1:-1]).decode()
    found["verificationMaterial"] = {"x509CertificateChain": {"certificates": [{"rawBytes": der}]}}
    with pytest.raises(InvalidArgument, match=r"the signature \(CN=old\) expired on"):
        check(Trusted.of_file(authority.ca), Bundle.read(json.dumps(found).encode()))


def test_a_certificate_is_of_the_key_that_signs(tmp_path: Path) -> None:
    authority = SigningAuthority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(InvalidArgument, match="is not the certificate of the key in"):
        Signer(one.key, certificate=other.certificate)


def test_an_encrypted_key_takes_its_password(tmp_path: Path) -> None:
    files = new_key(tmp_path, password="open sesame")
    assert check(Trusted.of_file(files.public), signed(Signer(files.key, password="open sesame")))
    with pytest.raises(PasswordNeeded, match="is encrypted"):
        Signer(files.key)
    with pytest.raises(PasswordNeeded, match="the password is not that of the key"):
        Signer(files.key, password="open barley")
    plain = new_key(tmp_path, "plain")
    assert signed(Signer(plain.key, password="of another key"))


def kinds(folder: Path) -> dict[str, KeyFiles]:
    return {
        "rsa": write_key(folder, rsa.generate_private_key(65537, 2048), "rsa"),
        "ed25519": write_key(folder, ed25519.Ed25519PrivateKey.generate(), "ed25519"),
        "secp256k1": new_key(folder, "secp256k1", curve=ec.SECP256K1()),
    }


def test_keys_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    for kind, files in kinds(tmp_path).items():
        with pytest.raises(InvalidArgument, match=f"(?i){kind}.*, not one on P-256, P-384 or P-521"):
            Signer(files.key)
        with pytest.raises(InvalidArgument, match=f"(?i){kind}.*, not one on P-256, P-384 or P-521"):
            Trusted.of_file(files.public)


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_files_that_hold_no_key_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.pem"
    path.write_bytes(content)
    for read in (Signer, Trusted.of_file, lambda file: Signer(new_key(tmp_path).key, certificate=file)):
        with pytest.raises(InvalidArgument, match=r"file\.pem holds"):
            read(path)


def test_a_private_key_is_not_taken_for_what_is_trusted(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds a private key") as refused:
        Trusted.of_file(new_key(tmp_path).key)
    assert "openssl pkey" in refused.value.fix


def test_a_signer_knows_its_own_signatures(tmp_path: Path) -> None:
    authority = SigningAuthority(tmp_path)
    issued, key = authority.issue("release"), new_key(tmp_path)
    signers = [Signer(key.key), Signer(issued.key), Signer(issued.key, certificate=issued.certificate)]
    bundles = [signed(each) for each in signers]
    assert [[has_signed(s, b) for b in bundles] for s in signers] == [[i == j for j in range(3)] for i in range(3)]
    assert not has_signed(signers[0], Bundle.read(changed(bundles[0].content)))


def test_what_is_missing_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = new_key(tmp_path)
    monkeypatch.delitem(sys.modules, "weighbridge._signing.library", raising=False)
    monkeypatch.delattr("weighbridge._signing.library", raising=False)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for needs in (lambda: Signer(files.key), lambda: Trusted.of_file(files.public)):
        with pytest.raises(FailedPrecondition, match="model_signing is not installed") as refused:
            needs()
        assert refused.value.fix == "pip install 'weighbridge[signing]'"


def test_signatures_are_called_by_their_digest() -> None:
    content = bundle(STATEMENT)
    assert Bundle.read(content).as_signature == Signature(Bundle.read(content).id, content)


def test_the_name_in_a_certificate_reaches_no_terminal_that_would_obey_it(tmp_path: Path) -> None:
    authority = SigningAuthority(tmp_path)
    for number, days in enumerate((30, 0.5)):  # one that counts, and one that has expired
        files = authority.issue(f"\x1b[2J{number}", days_ago=1, days=days)
        found = json.loads(signed(Signer(files.key)).content)
        der = b"".join(files.certificate.read_bytes().splitlines()[1:-1]).decode()
        found["verificationMaterial"] = {"x509CertificateChain": {"certificates": [{"rawBytes": der}]}}
        with pytest.raises(InvalidArgument, match="whose name cannot be printed"):
            check(Trusted.of_file(authority.ca), Bundle.read(json.dumps(found).encode()))
