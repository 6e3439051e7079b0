"""``python -m benchmarks.siege``: how a service serves its clients while an attacker takes all that it can get.

Each attack (`benchmarks.attacks`) runs against a service of its own, a real ``weighbridge serve``. Two bystanders,
processes as well, call it, probe it and pull from it: first alone, then while the attack stands. Then the attacker
ends, and the service's resources are watched until they are as before, or for half a minute. Attackers connect from
another address of the loopback network, as from another host; with ``--attacker-host 127.0.0.1``, from that of the
bystanders.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

from benchmarks import models, processes, report
from benchmarks.attacks import ATTACKS, Door, Doors, Part
from benchmarks.bystander_process import BystanderSpec, Window
from benchmarks.held_connections import Counts
from benchmarks.siege_verdicts import GIVEN_BACK_SECONDS, LEFT_MEMORY, MOST_MEMORY, Outcome, table, verdicts
from benchmarks.vital_signs import VitalSigns, forget_most, vital_signs
from weighbridge import TrainerClient
from weighbridge._clients.transport import find_faces
from weighbridge._transport import bulk_entry, rpc
from weighbridge_service.admission.tickets import Tickets, ticket_key
from weighbridge_storage.stores.local import LocalStore

MODEL = "siege/model"
_GIGABYTES = 0.2
_LOOK_SECONDS = 0.25
_WARM_SECONDS = 2.0
_LIMITED = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
    "from weighbridge._cli import main; main()"
)


@dataclass(frozen=True)
class Settings:
    """Settings of all attacks.

    Attributes:
        hold: seconds for which an attack stands.
        baseline: seconds for which bystanders are measured before it.
        patience: seconds in which the service has to give back all resources.
        scale: factor of the attacks' sizes.
        gigabytes: approximate size of the model that is pulled.
        sources: addresses that attackers connect from.
        memory: bytes by which the service may grow.
    """

    hold: float = 20.0
    baseline: float = 5.0
    patience: float = GIVEN_BACK_SECONDS
    scale: float = 1.0
    gigabytes: float = _GIGABYTES
    sources: tuple[str, ...] = ("127.0.0.2",)
    memory: int = MOST_MEMORY


class Besieged:
    """A running service, and where its log goes.

    Attributes:
        grpc: its gRPC address.
        http: its HTTP address.
        lane: path of its Unix socket.
        pid: its process.
    """

    def __init__(self, service: processes.Service, folder: Path, log: Path) -> None:
        self._store = folder / "store"
        self.grpc, self.http, self.pid = service.grpc, service.http.removeprefix("http://"), service.pid
        self.lane = find_faces(service.grpc).socket
        self._log = log

    @property
    def log_bytes(self) -> int:
        """Bytes of the service's log so far."""
        return self._log.stat().st_size

    def doors(self, settings: Settings) -> Doors:
        """Addresses that attackers connect to, with tickets as the service would issue them."""
        with rpc.open_channel(self.grpc) as channel:
            address = bulk_entry.ask(channel, self.grpc).address
        with closing(LocalStore(self._store)) as store:
            ticket = Tickets(ticket_key(store)).give(settings.sources[0])
        bulk = Door(address, metadata=((bulk_entry.TICKET, ticket),))
        return Doors(Door(self.grpc), bulk, Door(self.http), Door(self.lane))


@contextmanager
def besieged(folder: Path, gigabytes: float, descriptors: int | None) -> Iterator[Besieged]:
    """A service in a folder with a version of a model that is live.

    Args:
        folder: an empty folder.
        gigabytes: about how large the model is.
        descriptors: limit of the service's descriptors; None for the machine's limit.
    """
    hugging_face, log = folder / "hf", folder / "log"
    program: Sequence[str] = ("-m", "weighbridge")
    if descriptors is not None:
        program = ("-c", _LIMITED.format(limit=descriptors))
    specs = models.hugging_face_specs(models.write_config(models.config_of(gigabytes), hugging_face))
    nbytes = sum(spec.nbytes for spec in specs)
    save_file(models.RandomBits(spec.nbytes for spec in specs).of_specs(specs), hugging_face / "model.safetensors", {"format": "pt"})  # fmt: skip
    options = ("--log-level", "info", "--local-socket", str(folder / "lane.sock"))
    with (
        log.open("wb") as stderr,
        processes.service(folder, nbytes, *options, program=program, stderr=stderr.fileno()) as service,
    ):
        with TrainerClient(service.grpc, lane="grpc") as trainer:
            trainer.register_model(MODEL, hugging_face)
            trainer.push_folder(MODEL, hugging_face).wait(timeout=120)
        yield Besieged(service, folder, log)


class Bystanders:
    """Clients who mean no harm.

    Args:
        running: processes of `benchmarks.bystander_process`.
    """

    def __init__(self, running: Sequence[subprocess.Popen[str]]) -> None:
        self._running = running

    @staticmethod
    @contextmanager
    def at(service: Besieged) -> Iterator[Bystanders]:
        """Bystanders of a service."""
        with ExitStack() as stack:
            running = []
            for role in ("calls", "pulls"):
                spec = BystanderSpec(role, service.grpc, service.http, MODEL)
                arguments = ("-m", "benchmarks.bystander_process", json.dumps(asdict(spec)))
                running.append(stack.enter_context(processes.python(*arguments)))
            for process in running:
                processes.first_line(process)
            yield Bystanders(running)

    def end_window(self) -> dict[str, Window]:
        """End the window: the bystanders' measurements since the last call."""
        answers = [json.loads(_ask(process)) for process in self._running]
        return {name: Window(**values) for answer in answers for name, values in answer.items()}


def _ask(process: subprocess.Popen[str], question: str = "") -> str:
    assert process.stdin is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return processes.first_line(process)


class Looking:
    """Repeated readings of a service's resources.

    Attributes:
        peak: highest reading of each.
        died: whether the service ended.
    """

    def __init__(self, pid: int, start: VitalSigns) -> None:
        self.peak, self.died = start, False
        self._pid = pid
        self.last = start

    def look(self) -> VitalSigns:
        """Read the current resources; the last reading if the service has ended."""
        try:
            now = vital_signs(self._pid)
        except OSError:
            self.died = True
            return self.last
        mine, seen = asdict(self.peak), asdict(now)
        self.peak = VitalSigns(**{name: max(mine[name], seen[name]) for name in mine})
        self.last = now
        return now

    def until(self, ends: Callable[[], object]) -> None:
        """Look until something that waits has ended. Raises what it raises."""
        with ThreadPoolExecutor(1) as thread:
            ended = thread.submit(ends)
            while not wait([ended], _LOOK_SECONDS).done:
                self.look()
            ended.result()

    def during(self, seconds: float) -> None:
        """Look for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(_LOOK_SECONDS)


def given_back(looking: Looking, start: VitalSigns, patience: float) -> dict[str, float | None]:
    """Seconds from now until memory, threads and descriptors are as they were; None for what is not, after so much
    patience.
    """
    begun = time.monotonic()
    found: dict[str, float | None] = {}
    while True:
        now, passed = looking.look(), time.monotonic() - begun
        for name, back in now.back_at(start, LEFT_MEMORY).items():
            if not back:
                found[name] = None  # it may have been so by chance for a moment
            elif found.get(name) is None:
                found[name] = passed
        if None not in found.values() or passed > patience or looking.died:
            return found
        time.sleep(_LOOK_SECONDS)


def attack(service: Besieged, name: str, parts: Sequence[Part], settings: Settings) -> Outcome:
    """Try an attack on a service with bystanders."""
    with Bystanders.at(service) as bystanders:
        time.sleep(min(_WARM_SECONDS, settings.baseline))
        bystanders.end_window()
        time.sleep(settings.baseline)
        before = bystanders.end_window()
        forget_most(service.pid)
        start, logged = vital_signs(service.pid), service.log_bytes
        looking, begun = Looking(service.pid, start), time.monotonic()
        with processes.python("-m", "benchmarks.attacker_process") as attacker:
            assert attacker.stdin is not None
            attacker.stdin.write(json.dumps([asdict(part) for part in parts]) + "\n")
            attacker.stdin.flush()
            looking.until(partial(processes.first_line, attacker))
            coming = bystanders.end_window()
            looking.during(settings.hold)
            counts = [Counts(**each) for each in json.loads(_ask(attacker))]
            during, ended = bystanders.end_window(), looking.look()
            attacker.kill()
        cores = (ended.cpu_seconds - start.cpu_seconds) / (time.monotonic() - begun)
        back = given_back(looking, start, settings.patience)
        log_bytes = service.log_bytes - logged
    said = [part.said for part in parts]
    return Outcome(name, said, counts, before, coming, during, start, looking.peak, cores, log_bytes, back, looking.died)  # fmt: skip


def besiege(name: str, settings: Settings, folder: Path) -> Outcome:
    """Try one of `ATTACKS` on a service of its own.

    Args:
        name: name of the attack.
        settings: settings of the attack.
        folder: an empty folder.
    """
    chosen = ATTACKS[name]
    limit = chosen.descriptors
    with besieged(folder, settings.gigabytes, limit) as service:
        parts = [
            each
            for part in chosen.parts(service.doors(settings), MODEL)
            for each in part.scaled(settings.scale).spread(settings.sources)
        ]
        return attack(service, name, parts, settings)


def main(argv: Sequence[str] | None = None) -> None:
    """Attack, measure and print; exits with 1 if a promise was not kept."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="benchmarks.siege", description=__doc__)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="by default all")
    parser.add_argument(
        "--hold",
        type=float,
        default=usual.hold,
        help="seconds that an attack stands once all of it has come (default 20)",
    )
    parser.add_argument("--baseline", type=float, default=usual.baseline, help="seconds before (default 5)")
    parser.add_argument("--scale", type=float, default=usual.scale, help="of the attacks (default 1)")
    parser.add_argument("--gb", type=float, default=usual.gigabytes, help="size of the model (default 0.2)")
    parser.add_argument(
        "--attacker-host",
        nargs="+",
        default=list(usual.sources),
        help="addresses that attackers come from (default 127.0.0.2; bystanders are at 127.0.0.1)",
    )
    parser.add_argument("--memory", type=int, default=MOST_MEMORY >> 20, help="MiB that the service may grow")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    settings = replace(
        usual, hold=args.hold, baseline=args.baseline, scale=args.scale, gigabytes=args.gb, sources=tuple(args.attacker_host),
        memory=args.memory << 20,
    )  # fmt: skip
    outcomes: list[Outcome] = []
    for name in args.attacks:
        with tempfile.TemporaryDirectory() as scratch:
            outcomes.append(besiege(name, settings, Path(scratch)))
        print(table(outcomes[-1], settings.memory), end="\n\n", flush=True)
        if args.json is not None:
            report.write_json(
                args.json,
                settings=asdict(settings),
                attacks=[each.to_json() for each in outcomes],
            )
    kept: Mapping[str, bool] = {
        each.name: all(verdict.ok for verdict in verdicts(each, memory=settings.memory)) for each in outcomes
    }
    print(report.table(["attack", "held"], ([name, "yes" if ok else "NO"] for name, ok in kept.items())))
    sys.exit(not all(kept.values()))


if __name__ == "__main__":
    main()
