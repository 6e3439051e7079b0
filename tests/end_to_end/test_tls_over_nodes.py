"""Does the example of TLS over several nodes in docs/access.md hold, command by command? Addresses of loopback stand
for the nodes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.forked_commands import ForkedCommands, forked_commands
from tests.support.ports import own_network
from tests.support.raw_clients import RawClient, assert_equal, cut, rows_layout, stream_of, tiny_folder
from weighbridge import Credentials, EngineClient, Unauthenticated, Unavailable
from weighbridge._core.resources import VersionState

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "access.md"
CERTIFICATES = ROOT / "deploy" / "certificates.sh"
_SECTION = re.compile(r"^### TLS over several nodes$(.*?)^##", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
MODEL = "acme/smol"


@dataclass(frozen=True)
class Nodes:
    """Two nodes, with the services of the example.

    Attributes:
        names: their addresses, which no other run of the tests on this machine has.
        clients: the example's last block, for clients.
        commands: which it finds.
    """

    names: tuple[str, str]
    clients: str
    commands: ForkedCommands

    @property
    def servers(self) -> tuple[str, str]:
        """The services' addresses."""
        return f"{self.names[0]}:50051", f"{self.names[1]}:50051"

    def run(self, script: str) -> None:
        """Run commands, each of which has to succeed."""
        line = ["bash", "-euo", "pipefail", "-c", script]
        subprocess.run(line, check=True, env=self.commands.environment, timeout=120)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.chdir(tmp_path)
    Path("deploy").symlink_to(ROOT / "deploy")
    network = own_network()
    section = _SECTION.search(PAGE.read_text("utf-8"))
    assert section is not None
    once, node, clients = (block.replace("127.0.0.", f"{network}.") for block in _BLOCK.findall(section[1]))
    names = (f"{network}.2", f"{network}.3")
    with forked_commands(tmp_path / "bin") as commands:
        found = Nodes(names, clients, commands)
        found.run(once)
        services = []
        for name in names:
            script = node.replace(f"NODE={names[0]}", f"NODE={name}")
            line = ["bash", "-euc", script]
            services.append(subprocess.Popen(line, env=commands.environment, stdout=subprocess.PIPE, text=True))
        for service, name in zip(services, names, strict=True):
            assert service.stdout is not None
            assert service.stdout.readline().startswith(f"weighbridge serving gRPC on {name}:50051")
        yield found
        for service in services:
            service.terminate()
        for service in services:
            with service:
                assert service.wait(60) == 0


def test_what_is_pushed_to_one_node_is_pulled_from_the_other_over_tls(nodes: Nodes) -> None:
    source = tiny_folder(Path("HF_DIR"), seed=1)
    nodes.run(nodes.clients)
    (pulled,) = Path("pulled").glob("*.safetensors")
    assert {name: array.tobytes() for name, array in load_file(pulled).items()} == {
        name: array.tobytes() for name, array in source.arrays.items()
    }

    shown = Credentials(ca="tls/ca.pem", token_file="token")
    arrays = tiny_folder(Path("of_ranks"), seed=2).arrays

    def push(rank: int) -> int:
        """A rank's push to its own node; its rows of files that are at the other one go there."""
        with RawClient(nodes.servers[rank], shown) as raw:
            number = raw.open(MODEL, ranks=2, request_id="of both", step=2)
            layout = rows_layout(arrays, rank, 2)
            stream = stream_of(arrays, layout, raw.declare(MODEL, number, layout, rank=rank))
            raw.push(MODEL, number, cut(stream), rank=rank)
            raw.seal(MODEL, number, rank=rank)
            routes = {route.address for route in raw.answers[number, rank].routes}
            assert routes <= {"", nodes.servers[1 - rank]}
            crossed.update(routes)
            return number

    crossed: set[str] = set()
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        (number,) = set(pool.map(push, range(2)))
        assert crossed & set(nodes.servers), "bytes of one rank belong to the other node"
        for server in nodes.servers:
            engine = stack.enter_context(EngineClient(server, credentials=shown))
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, arrays)

    with pytest.raises(Unauthenticated):
        RawClient(nodes.servers[1], Credentials(ca="tls/ca.pem", token="another")).open(MODEL)
    with pytest.raises(Unavailable):
        RawClient(nodes.servers[1]).open(MODEL)


@pytest.mark.parametrize("name", ["node 7", "", "node7,a/b"])
def test_certificates_are_made_for_names_and_addresses_alone(tmp_path: Path, name: str) -> None:
    line = [CERTIFICATES, tmp_path / "tls", name]
    refused = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "no name or address" in refused.stderr
    assert not list((tmp_path / "tls").glob("node*"))


def test_certificates_that_are_made_again_are_of_the_same_authority(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    for names in ("*.nodes.test,node7,10.0.0.7", "*.nodes.test,::1"):
        subprocess.run([CERTIFICATES, folder, names], check=True, capture_output=True, timeout=60)
        line = ["openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.pem", folder / "nodes.test.pem"]
        subprocess.run(line, check=True, capture_output=True, timeout=60)
    assert {path.name for path in folder.iterdir()} == {
        "ca.pem",
        "ca.key",
        "nodes.test.pem",
        "nodes.test.key",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.key"))
