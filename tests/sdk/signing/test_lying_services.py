"""Does a client of signatures believe nothing of a service that it can know by itself?"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.message import Message

from tests.sdk.signing.test_statements import SHA, bundle, manifest, statement
from tests.support.signing import new_key
from weighbridge import Signer, Trusted
from weighbridge._clients.calls.steps import UnaryCall, take
from weighbridge._clients.calls.version_calls import get_signatures
from weighbridge._formats.side_files.signature_files import write_signature_files
from weighbridge._signing.signer import sign
from weighbridge._signing.steps import verify_signed
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2

VERSION = manifest()
STATEMENT = statement(VERSION)


class Service:
    """A service that answers each method with one response."""

    def __init__(self, **answers: Message) -> None:
        self._answers = answers

    def __call__(self, call: UnaryCall) -> bytes:
        return self._answers[call.path.rpartition("/")[2]].SerializeToString()


def test_a_signature_is_written_nowhere_else_by_what_the_service_calls_it(tmp_path: Path) -> None:
    content = bundle(STATEMENT)
    lying = pb.GetSignaturesResponse(number=17, signatures=[resources_pb2.Signature(id="../../lying", content=content)])
    _, found = take(get_signatures(VERSION.model, 17), Service(GetSignatures=lying))
    (path,) = write_signature_files(tmp_path / "a" / "signatures", found)
    assert [*tmp_path.rglob("*.sig")] == [path]
    assert path.parent == tmp_path / "a" / "signatures"


@pytest.mark.parametrize(
    ("sha256", "problem"),
    [
        ({"model.safetensors": SHA["b"], "config.json": SHA["a"]}, ()),
        ({"config.json": SHA["a"]}, ("the service does not report the SHA-256 of model.safetensors",)),
        (
            {"model.safetensors": SHA["d"], "config.json": SHA["a"]},
            ("model.safetensors has a different SHA-256",),
        ),
        ({"model.safetensors": SHA["b"], "config.json": SHA["a"], "other": SHA["d"]}, ()),
    ],
)
def test_a_version_is_verified_whose_files_all_have_the_signed_digests(
    tmp_path: Path, sha256: dict[str, str], problem: tuple[str, ...]
) -> None:
    keys = new_key(tmp_path)
    content = sign(Signer(keys.key), STATEMENT)
    junk = b"nothing that a bundle is"
    service = Service(
        GetSignatures=pb.GetSignaturesResponse(
            number=17,
            signatures=[resources_pb2.Signature(content=content), resources_pb2.Signature(content=junk)],
        ),
        ReadManifest=pb.ReadManifestResponse(data=VERSION.text, total_bytes=len(VERSION.text)),
        VerifyVersion=pb.VerifyVersionResponse(number=17, sha256=sha256),
    )
    verified, signed = take(verify_signed(VERSION.model, 17, [Trusted.of_file(keys.public)]), service)
    assert len(signed) == 1
    assert len(verified.problems) == len(problem)
    assert all(found.startswith(said) for found, said in zip(verified.problems, problem, strict=True))
