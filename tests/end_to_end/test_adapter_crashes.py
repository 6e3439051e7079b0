"""Does each adapter's name keep its own versions, whole and on a base that is kept, whatever is killed while adapters
are pushed to several names?

Weights and ``lora_alpha`` of a version follow from its name and step, and differ between any two. The base is pushed in
the meantime, and its old versions are collected. ``WEIGHBRIDGE_ADAPTER_KILLS`` sets the number of kills,
``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import forking
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import first_seed, rounds
from tests.support.waiting import eventually
from tests.support.zero3_ranges import partition
from weighbridge import EngineClient, NotFound, TrainerClient, VersionState, WeighbridgeError
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import REF_LATEST, Retention, Version

peft = pytest.importorskip("peft")
KILLS = rounds("ADAPTER_KILLS")
SEED = first_seed()
BASE = "acme/smol"
RANGES, COPIES, ALONE = "acme/ranges", "acme/copies", "acme/alone"
"""Adapters of which each of two ranks has a range, of which each has a copy, and of which one rank has all."""
NAMES = (RANGES, COPIES, ALONE)
RANKS = 2
STEPS_OF_A_LIFE = 100_000
SHORT_LIFE = 0.3
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=1)
_JOIN_SECONDS = 60.0
_WAIT_SECONDS = 30.0


@dataclass
class Adapter:
    """A model with an adapter, which is filled for one step after the other.

    Attributes:
        model: of peft.
        shapes: of the adapter's parameters.
    """

    name: str
    model: Any = field(init=False)
    shapes: dict[str, torch.Size] = field(init=False)

    def __post_init__(self) -> None:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        self.model = peft.get_peft_model(tiny_model(CONFIG, seed=1), config)
        self.shapes = {name: parameter.shape for name, parameter in self.model.named_parameters() if "lora_" in name}

    def fill(self, step: int) -> None:
        """Weights and alpha of this name at a step."""
        own = step * len(NAMES) + NAMES.index(self.name)
        generator = torch.Generator().manual_seed(own)
        self.model.peft_config["default"].lora_alpha = own
        for name, parameter in self.model.named_parameters():
            if name in self.shapes:
                parameter.data = torch.randn(self.shapes[name], generator=generator)

    def cut(self, rank: int) -> None:
        """Leave a rank its range of each parameter of the adapter."""
        for name, parameter in self.model.named_parameters():
            if name in self.shapes:
                partition(parameter, rank, RANKS)


@dataclass(frozen=True)
class Rank:
    """A rank in one life: a thread for each name that it pushes to, until the service is gone.

    Attributes:
        notes: of all ranks: what has happened, the name, the number and the step of its version.
    """

    address: str
    rank: int
    life: int
    notes: Path
    base: Path
    lane: str

    def run(self) -> None:
        """Push until this process is killed or nothing is left to do."""
        works: list[Callable[[TrainerClient], None]] = [
            partial(self._push, RANGES, RANKS), partial(self._push, COPIES, RANKS),
        ]  # fmt: skip
        if self.rank == 0:
            works += [partial(self._push, ALONE, 1), self._push_bases]
        threads = [threading.Thread(target=self._until_gone, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _until_gone(self, work: Callable[[TrainerClient], None]) -> None:
        try:
            with TrainerClient(self.address, retry_seconds=0.2, lane=self.lane) as client:
                work(client)
        except WeighbridgeError:
            pass  # the service or the other rank is gone
        except BaseException as error:
            self._note("broken", repr(error).replace(" ", "_"), 0, 0)
            raise

    def _push(self, name: str, ranks: int, client: TrainerClient) -> None:
        adapter = Adapter(name)
        for step in count(self.life * STEPS_OF_A_LIFE + 1):
            adapter.fill(step)
            if name == RANGES:
                adapter.cut(self.rank)
            handle = client.push_adapter(
                name, adapter.model, base=f"{BASE}@latest", step=step, rank=self.rank, world_size=ranks,
                run=f"life-{self.life}",
            )  # fmt: skip
            self._note("opened", name, handle.number, step)
            handle.copied()
            if step % 3 == 0:  # otherwise the next one begins while this one is being published
                handle.wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)
                self._note("durable", name, handle.number, step)

    def _push_bases(self, client: TrainerClient) -> None:
        for step in count(self.life * STEPS_OF_A_LIFE + 1):
            client.push_folder(BASE, self.base, step=step).wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)

    def _note(self, what: str, name: str, number: int, step: int) -> None:
        with self.notes.open("a") as file:
            file.write(f"{what} {name} {number} {step}\n")


@dataclass
class Record:
    """The results that ranks received and the versions that checks found, over all lives of the service.

    Attributes:
        folder: for files that are compared.
        durable: numbers of versions that were acknowledged or seen as durable, by name.
        steps: of versions, by name and number.
        checked: versions that were compared while they were durable.
    """

    folder: Path
    notes: Path
    durable: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    steps: dict[tuple[str, int], int] = field(default_factory=dict)
    checked: set[tuple[str, int]] = field(default_factory=set)
    _expected: dict[str, Adapter] = field(default_factory=lambda: {name: Adapter(name) for name in NAMES})
    _read: int = 0

    def has_grown(self, size: int) -> bool:
        """Whether the notes are longer than this many bytes."""
        return self.notes.stat().st_size > size

    def read(self) -> None:
        """Read the notes that ranks have added since the last call; each line was written at once."""
        with self.notes.open() as file:
            file.seek(self._read)
            for line in file.readlines():
                what, name, number, step = line.split()
                assert what != "broken", line
                assert self.steps.setdefault((name, int(number)), int(step)) == int(step), line
                if what == "durable":
                    self.durable[name].add(int(number))
            self._read = file.tell()

    def check(self, service: KillableService, again: bool = False) -> None:
        """Check that each visible version is as pushed under its name, on a kept base, and that every acknowledged one
        exists.
        """
        self.read()
        with EngineClient(service.address) as client:
            for name in NAMES:
                self._check_name(client, name, again)
            self._check_bases(client, Path(service.store) / "models" / BASE)

    def _check_name(self, client: EngineClient, name: str, again: bool) -> None:
        try:
            listed = {each.number: each for each in client.versions(name) if each.state.visible}
        except NotFound:  # its first push has not come so far
            listed = {}
        missing = self.durable[name] - listed.keys()
        assert not missing, f"versions of {name} that were durable are gone: {sorted(missing)}"
        for number, version in listed.items():
            if again or (name, number) not in self.checked:
                self._check_version(client, name, version)
        if self.durable[name]:
            assert client.refs(name)[REF_LATEST] >= max(self.durable[name])

    def _check_version(self, client: EngineClient, name: str, version: Version) -> None:
        step, out, saved = version.step, self.folder / "out", self.folder / "saved"
        assert self.steps.setdefault((name, version.number), step) == step
        shutil.rmtree(out, ignore_errors=True)
        client.export(name, version.number, out)
        self._expected[name].fill(step)
        self._expected[name].model.save_pretrained(saved, save_embedding_layers=False)
        there, pushed = (load_file(each / "adapter_model.safetensors") for each in (out, saved))
        assert there.keys() == pushed.keys()
        assert all(torch.equal(there[key], tensor) for key, tensor in pushed.items()), (name, version)
        assert config_in(out) == config_in(saved), (name, version)
        if version.state is VersionState.DURABLE:
            assert not client.verify(name, version.number).problems
            self.durable[name].add(version.number)
            self.checked.add((name, version.number))

    def _check_bases(self, client: EngineClient, folder: Path) -> None:
        bases = {each.number for each in client.versions(BASE) if each.state.visible}
        pins = {
            (each["version"], each["adapter"])
            for each in json.loads((folder / "head.json").read_text()).get("pins", [])
        }
        bases |= {each.number for each in client.versions(BASE) if each.state.visible}
        assert {number for number, _ in pins} <= bases
        for name in NAMES:
            for version in client.versions(name) if self.durable[name] else []:
                if version.number in self.durable[name]:
                    base = BaseVersion.of(version.metadata)
                    assert base is not None
                    assert (base.model, version.error) == (BASE, "")
                    assert (base.number, name) in pins
                    manifest = folder / f"versions/{base.number:012d}/weighbridge.json"
                    assert json.loads(manifest.read_text())["digest"] == base.digest


def config_in(folder: Path) -> dict[str, Any]:
    """The config of an adapter in a folder; sets have no order."""
    said = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in said.items()}


@pytest.fixture(params=["local", "grpc"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(tmp_path: Path, lane: str) -> Iterator[KillableService]:
    """With collections; with a socket, if ranks go by the local lane."""
    socket = {"local_socket": str(tmp_path / "lane.sock")} if lane == "local" else {}
    # longer than one rank is later than the other on a machine that has other work
    killable = KillableService(tmp_path / "store", receive_timeout=20.0, collect_every=0.2, grace_seconds=2.0, **socket)
    yield killable
    killable.kill()


@pytest.mark.timeout(120 + 30 * KILLS)
def test_each_name_keeps_its_versions_whole_and_on_their_bases_whatever_is_killed(
    service: KillableService, lane: str, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    notes, base = tmp_path / "notes", tmp_path / "base"
    notes.touch()
    tiny_model(CONFIG, seed=1).save_pretrained(base)
    record = Record(tmp_path, notes)
    service.start()
    with TrainerClient(service.address) as trainer:
        trainer.import_folder(BASE, base, step=0).wait(timeout=_WAIT_SECONDS)
        trainer.set_retention(BASE, Retention(keep_last=3))
    for life in range(max(KILLS // 2, 1)):
        ranks = [
            forking().Process(target=Rank(service.address, rank, life, notes, base, lane).run, daemon=True)
            for rank in range(RANKS)
        ]
        begun, size = time.monotonic(), notes.stat().st_size
        for each in ranks:
            each.start()
        if not life or chance.random() < 0.8:  # the others are cut off wherever they are
            eventually(partial(record.has_grown, size))
        # as long again as it took, on this machine with what else it does, until the first version was open
        time.sleep(chance.uniform(0.0, max(SHORT_LIFE, time.monotonic() - begun)))
        victim = chance.choice(["service", "rank", "ranks", "all"])
        if victim in ("service", "all"):
            service.kill()
        for each in ranks[: {"service": 0, "rank": 1}.get(victim, RANKS)]:
            each.kill()
        if victim in ("service", "all"):
            if chance.random() < 0.2:  # once more, while it starts
                service.start(wait=False)
                time.sleep(chance.uniform(0.0, 0.5))
                service.kill()
            service.start()
        time.sleep(chance.uniform(0.0, 0.2))
        for each in ranks:
            each.kill()
            each.join(_JOIN_SECONDS)
        record.check(service)
        print(
            f"life {life + 1}, {victim}: {len(record.checked)} of {len(record.steps)} versions are durable",
            flush=True,
        )
    with TrainerClient(service.address) as trainer:
        for name in NAMES:
            adapter, step = Adapter(name), KILLS * STEPS_OF_A_LIFE
            adapter.fill(step)
            version = trainer.push_adapter(name, adapter.model, base=f"{BASE}@latest", step=step).wait(
                timeout=_WAIT_SECONDS
            )
            record.durable[name].add(version.number)
    record.check(service, again=True)
    assert {name for name, _ in record.checked} == set(NAMES)
