"""Does everything go over TLS, to whom it should, with certificates that are renewed meanwhile?"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from cryptography import x509

from tests.support.identities import Authority, identity, policy_file
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import AsyncEngineClient, Credentials, EngineClient, TrainerClient
from weighbridge.errors import InvalidArgument, Unauthenticated, Unavailable, WeighbridgeError
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.hub_routes import DEFAULT_SIZES, HubSizes
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.server import HttpServer, run

MODEL = "acme/smol"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@contextlib.contextmanager
def https(running: RunningService, hub: HubSizes = DEFAULT_SIZES) -> Iterator[str]:
    """The HTTP face of a service, over TLS; its URL."""
    tls = running.service.config.tls
    server = HttpServer("127.0.0.1:0", 64, certificates=Certificates(tls) if tls is not None else None)
    exports = Exports(running.service)
    server.start(create_app(running.service, exports, running.metrics, running.health, hub=hub))
    try:
        yield server.url
    finally:
        server.stop()
        exports.close()


def assert_pulled(engine: EngineClient, source: TinyModel) -> None:
    pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL)}
    assert set(pulled) == set(source.arrays)
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(pulled[name], array)


def test_weights_and_calls_go_over_tls_by_both_ports_and_asyncio(
    tmp_path: Path, authority: Authority, source: TinyModel
) -> None:
    shown = authority.client()
    with running_service(tmp_path / "store", tls=authority.tls(), bulk_port="auto") as running:
        assert running.grpc._listener.bulk is not None
        with TrainerClient(running.address, credentials=shown) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        with EngineClient(running.address, credentials=shown) as engine:
            assert_pulled(engine, source)
            assert next(iter(engine.watch(MODEL))).number == 1

        async def pull() -> dict[str, np.ndarray]:
            async with AsyncEngineClient(running.address, credentials=shown) as client:
                return {name: tensor.numpy() async for name, tensor in client.pull(MODEL)}

        pulled = asyncio.run(pull())
        assert all(np.array_equal(pulled[name], array) for name, array in source.arrays.items())


def test_who_trusts_another_authority_or_speaks_plainly_is_told(
    tmp_path: Path, authority: Authority, source: TinyModel
) -> None:
    stranger = Authority(tmp_path / "stranger")
    with running_service(tmp_path / "store", tls=authority.tls()) as running:
        for shown in (stranger.client(), Credentials()):
            with (
                EngineClient(running.address, retry_seconds=0, credentials=shown) as engine,
                pytest.raises(Unavailable) as refused,
            ):
                engine.models()
            assert "WEIGHBRIDGE_CA" in refused.value.fix
    with (
        running_service(tmp_path / "plain") as running,
        EngineClient(running.address, retry_seconds=0, credentials=authority.client()) as engine,
        pytest.raises(Unavailable) as refused,
    ):
        engine.models()
    assert "WEIGHBRIDGE_CA" in refused.value.fix


def test_a_service_that_asks_for_certificates_knows_clients_by_them(
    tmp_path: Path, authority: Authority, source: TinyModel
) -> None:
    policy = policy_file(tmp_path, identity("trainer", ["push:acme/*", "pull:acme/*"], certificates=["trainer.test"]))
    stranger = Authority(tmp_path / "stranger")
    with running_service(tmp_path / "store", tls=authority.tls(asks_clients=True), policy=policy) as running:
        with TrainerClient(running.address, credentials=authority.client("trainer.test")) as trainer:
            trainer.register_model(MODEL, source.folder)
        certificate, key = stranger.issue("trainer.test")
        forged = Credentials(ca=str(authority.ca), certificate=str(certificate), key=str(key))
        for shown, reason in (
            (authority.client("engine.test"), "engine.test"),
            (authority.client(), "cannot be reached"),
            (forged, "cannot be reached"),
        ):
            with (
                EngineClient(running.address, retry_seconds=0, credentials=shown) as engine,
                pytest.raises(WeighbridgeError, match=reason),
            ):
                engine.models()


@pytest.mark.parametrize(
    "disguise",
    [
        x509.DNSName("trainer.test\0.evil.test"),
        x509.RFC822Name("trainer.test"),
        x509.UniformResourceIdentifier("trainer.test"),
        x509.DNSName("spiffe://acme/trainer"),
    ],
    ids=["NUL", "e-mail address", "host as URI", "URI as host"],
)
def test_a_name_counts_whole_and_as_the_kind_of_name_that_it_is(
    tmp_path: Path, authority: Authority, disguise: x509.GeneralName
) -> None:
    names = ["trainer.test", "spiffe://acme/trainer"]
    policy = policy_file(tmp_path, identity("trainer", ["look:acme/*"], certificates=names))
    forged, tls = authority.client_called(disguise), authority.tls(asks_clients=True)
    with (
        running_service(tmp_path / "store", tls=tls, policy=policy) as running,
        https(running) as url,
    ):
        with (
            EngineClient(running.address, retry_seconds=0, credentials=forged) as engine,
            pytest.raises(Unauthenticated),
        ):
            engine.models()
        showing = ssl.create_default_context(cafile=authority.ca)
        assert forged.certificate is not None
        showing.load_cert_chain(forged.certificate, forged.key)
        with httpx.Client(verify=showing) as other:
            assert other.get(f"{url}/v1/models").status_code == 401


def test_over_http_probes_do_without_a_certificate_and_nothing_else_does(tmp_path: Path, authority: Authority) -> None:
    files = authority.tls(asks_clients=True)
    with running_service(tmp_path / "store", tls=files) as running, https(running) as url:
        trusting = ssl.create_default_context(cafile=authority.ca)
        with httpx.Client(verify=trusting) as nobody:
            assert nobody.get(f"{url}/livez").status_code == 200
            refused = nobody.get(f"{url}/v1/models")
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        showing = ssl.create_default_context(cafile=authority.ca)
        showing.load_cert_chain(*authority.issue("me.test"))
        with httpx.Client(verify=showing) as me:
            assert me.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_certificate_whose_authority_is_withdrawn_counts_no_longer_in_a_session_of_before(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    authority = Authority(tmp_path / "authority")
    tls = authority.tls(asks_clients=True)
    trusting = ssl.create_default_context(cadata=authority.ca.read_text())
    trusting.minimum_version = trusting.maximum_version = version
    trusting.load_cert_chain(*authority.issue("engine-7"))
    policy = policy_file(tmp_path, identity("engine", ["pull:acme/*"], certificates=["engine-7"]))

    def answer(address: str, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        host, port = address.removeprefix("https://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(12), connection.session

    with running_service(tmp_path / "store", tls=tls, policy=policy) as running, https(running) as url:
        said, session = answer(url, None)
        assert said == b"HTTP/1.1 200"
        assert tls.client_ca is not None
        tls.client_ca.write_bytes(Authority(tmp_path / "next").ca.read_bytes())
        with contextlib.suppress(OSError):  # the handshake may have been refused
            said, _ = answer(url, session)
            assert said != b"HTTP/1.1 200"


def serial(address: str, authority: Authority) -> int:
    """Serial number of the certificate that a port shows now."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=authority.ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


def test_certificates_are_renewed_under_load_and_no_stream_breaks(
    tmp_path: Path, authority: Authority, source: TinyModel
) -> None:
    files = authority.tls()
    shown = authority.client()
    with (
        running_service(tmp_path / "store", tls=files, bulk_port="auto") as running,
        https(running) as url,
    ):
        bulk = running.grpc._listener.bulk
        assert bulk is not None
        ports = [running.address, f"127.0.0.1:{bulk.port}", url.removeprefix("https://")]
        with TrainerClient(running.address, credentials=shown) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        broken: list[BaseException] = []
        rounds, stop = [0], threading.Event()

        def load() -> None:
            try:
                # one try for each call: a connection that was cut off would be an error here
                with EngineClient(running.address, retry_seconds=0, credentials=shown) as engine:
                    watch = engine.watch(MODEL)
                    assert next(iter(watch)).number == 1
                    while not stop.is_set():
                        assert_pulled(engine, source)
                        rounds[0] += 1
            except BaseException as error:
                broken.append(error)

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        seen = {port: {serial(port, authority)} for port in ports}
        for _ in range(3):
            authority.issue("127.0.0.1", "localhost", under="service")
            before = rounds[0]
            while rounds[0] < before + 3 and not broken:
                stop.wait(0.01)
            for port in ports:
                seen[port].add(serial(port, authority))
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not broken, broken
        assert [len(found) for found in seen.values()] == [4, 4, 4]


def test_a_renewed_certificate_that_does_not_fit_its_key_is_passed_by(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("127.0.0.1", under="half-renewed")
    other, _ = authority.issue("127.0.0.1", under="other")
    from weighbridge_service.runtime.tls_files import TlsFiles

    with (
        running_service(tmp_path / "store", tls=TlsFiles(certificate, key)) as running,
        EngineClient(running.address, credentials=authority.client()) as engine,
    ):
        first = serial(running.address, authority)
        certificate.write_bytes(other.read_bytes())
        assert serial(running.address, authority) == first
        assert engine.models() == []


@pytest.mark.parametrize(("grpc", "http"), [("0.0.0.0:0", "127.0.0.1:0"), ("127.0.0.1:0", "[::]:0")])
def test_without_tls_a_service_listens_on_loopback_alone_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grpc: str, http: str
) -> None:
    assert run(ServiceConfig(tmp_path / "store"), grpc, http) == 1
    assert "--insecure" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "other key", "no certificate"])
def test_files_that_cannot_be_used_are_said_to_be_at_the_start(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    from weighbridge_service.runtime.tls_files import TlsFiles

    certificate, key = authority.issue("127.0.0.1", under=damage)
    if damage == "missing":
        certificate.unlink()
    elif damage == "other key":
        key.write_bytes(authority.issue("localhost")[1].read_bytes())
    else:
        certificate.write_text("nothing")
    config = ServiceConfig(tmp_path / "store", tls=TlsFiles(certificate, key))
    assert run(config, "127.0.0.1:0", "127.0.0.1:0") == 1
    assert certificate.name in capsys.readouterr().err


@pytest.mark.parametrize("server", ["10.0.0.7:50051", "weights.acme.internal:50051"])
def test_a_token_is_not_sent_to_other_machines_without_tls(server: str) -> None:
    with (
        EngineClient(server, retry_seconds=0, credentials=Credentials(token="secret")) as engine,
        pytest.raises(InvalidArgument, match="without TLS"),
    ):
        engine.models()


def test_credentials_come_from_the_environment_and_are_not_shown(tmp_path: Path, authority: Authority) -> None:
    found = Credentials.from_environment(
        {"WEIGHBRIDGE_CA": "ca.pem", "WEIGHBRIDGE_TOKEN": "secret", "WEIGHBRIDGE_CERT": ""}
    )
    assert found == Credentials(ca="ca.pem", token="secret")
    assert "secret" not in repr(found)
    for wrong in (
        {"certificate": "a"},
        {"key": "a"},
        {"certificate": "a", "key": "b"},
        {"token": "a", "token_file": "b"},
    ):
        with pytest.raises(InvalidArgument):
            Credentials(**wrong)
    with (
        EngineClient("127.0.0.1:1", retry_seconds=0, credentials=Credentials(ca="nowhere.pem")) as engine,
        pytest.raises(InvalidArgument, match=r"nowhere\.pem"),
    ):
        engine.models()
