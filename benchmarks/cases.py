"""What do a push and a pull cost in one case: a size of model, a number of clients, a cut, a lane?

Each round measures a push and its yardsticks one after the other, and later a pull and its own, so that all of a round were measured
under the same load. The first rounds warm up; memory is sampled in them and their times do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import models, processes
from benchmarks.client_process import MODEL, ClientSpec
from benchmarks.clients import Clients, clients
from benchmarks.memory import Sampler, memory_of
from weighbridge import Retention, TrainerClient

_GRACE_SECONDS = 1.1
"""A little more than the service's grace time."""

RATIOS = {
    # what it is: seconds of ours, seconds of the yardstick
    "held_to_copy": ("held", "copy"),
    "ready_to_copy": ("ready", "copy"),
    "stream_to_raw": ("stream", "raw_push"),
    "pull_to_raw": ("pull", "raw_pull"),
    "pull_to_copy": ("pull", "slice_copy"),
    "view_to_copy": ("view", "slice_copy"),
}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        gigabytes: about how large the model is.
        clients: how many trainer ranks push, and how many engines pull.
        cut: one of `benchmarks.cuts.CUTS`.
        lane: ``grpc`` or ``local``.
        device: where clients' tensors lie, ``cpu`` or ``cuda``.
    """

    gigabytes: float
    clients: int
    cut: str
    lane: str
    device: str = "cpu"


@dataclass
class Figures:
    """What was measured.

    Attributes:
        case: the case.
        seconds: by name, one value for each round; of the client that took longest.
        nbytes: ``model``, ``pushed`` and ``arrived`` of one push, ``asked`` and ``pulled`` of one pull, of all clients together.
        memory: bytes beyond the start: ``service``, ``trainer``, ``engine`` (of a process, the largest) and ``together`` as
            proportional sets, ``*_high_water_mark`` as resident ones.
        lanes: which lanes were taken.
        verified: whether engines had the very bytes that trainers pushed; None if slices and shards are cut differently.
    """

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    lanes: set[str] = field(default_factory=set)
    verified: bool | None = None

    def note(self, name: str, seconds: float) -> None:
        """Add a round's time."""
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float | None:
        """Median over the rounds in seconds; None if it was not measured."""
        return statistics.median(self.seconds[name]) if name in self.seconds else None

    def ratio(self, name: str) -> float | None:
        """One of `RATIOS`: the median of the rounds' ratios; None if it was not measured."""
        ours, yardstick = (self.seconds.get(each, []) for each in RATIOS[name])
        if not ours or not yardstick:
            return None
        return statistics.median(a / b for a, b in zip(ours, yardstick, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, each round by itself."""
        return {
            **asdict(self.case),
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "medians": {name: self.median(name) for name in self.seconds},
            "ratios": {name: value for name in RATIOS if (value := self.ratio(name)) is not None},
            "memory": self.memory,
            "lanes": sorted(self.lanes),
            "verified": self.verified,
        }


def run_case(
    case: Case,
    rounds: int,
    folder: Path,
    while_serving: Callable[[processes.Service], None] = lambda _service: None,
    *,
    warm_up: int = 2,
) -> Figures:
    """Measure a case with a service of its own.

    Args:
        case: which case.
        rounds: how many rounds count.
        folder: an empty folder for the store; there is nothing in it in the end that is needed.
        while_serving: is called with the service when one version is durable and clients are gone.
        warm_up: how many rounds come before and do not count; a service needs two until it has all its buffers.

    Raises:
        ClientError: a client failed.
    """
    figures = Figures(case)
    config = models.write_config(models.config_of(case.gigabytes), folder / "hf")
    specs = models.hugging_face_specs(config)
    models.write_specs(specs, folder / "specs.json")
    figures.nbytes["model"] = sum(spec.nbytes for spec in specs)
    with (
        processes.raw_grpc_server() as raw,
        processes.service(folder, figures.nbytes["model"]) as service,
        TrainerClient(service.grpc) as admin,
    ):
        admin.register_model(MODEL, folder / "hf")
        admin.set_retention(MODEL, Retention(keep_last=1))
        start = memory_of(service.pid).proportional
        spec = ClientSpec(
            "trainer", service.grpc, raw, str(folder / "specs.json"), case.cut, case.lane, case.clients, 0,
            case.device,
        )  # fmt: skip
        pushed = _push_rounds(figures, spec, (warm_up, rounds), admin, (service.pid, start))
        pulled = _pull_rounds(figures, spec, (warm_up, rounds), (service.pid, start))
        if case.cut != "megatron":
            figures.verified = pushed == pulled
        while_serving(service)
    return figures


def _push_rounds(
    figures: Figures,
    spec: ClientSpec,
    rounds: tuple[int, int],
    admin: TrainerClient,
    service: tuple[int, int],
) -> list[str]:
    warm_up, counted = rounds
    with clients(spec) as trainers:
        for number in range(warm_up + counted):
            with _memory_sampled(figures, "trainer", trainers, service, number < warm_up):
                copied = trainers.start("copy")
                pushed = trainers.start("push", step=number + 1)
                streamed = trainers.start("raw") if figures.case.lane == "grpc" else []
            _make_room(admin)
            figures.nbytes["pushed"] = sum(each["bytes"] for each in pushed)
            figures.nbytes["arrived"] = pushed[0]["version_bytes"]
            figures.lanes |= {each["lane"] for each in pushed}
            if number < warm_up:
                continue
            first_byte = min(each["first_byte"] for each in pushed)
            figures.note("copy", _longest(copied))
            figures.note("held", _longest(pushed, "held"))
            figures.note("called", _longest(pushed, "called"))
            figures.note("stream", _longest(pushed, "stream"))
            figures.note("ready", min(each["ready"] for each in pushed) - first_byte)
            figures.note("durable", pushed[0]["durable"] - first_byte)
            if streamed:
                figures.note("raw_push", _longest(streamed))
        _note_high_water_mark(figures, "trainer", trainers)
        return [str(answer["digest"]) for answer in trainers.ask("digest")]


def _pull_rounds(
    figures: Figures, spec: ClientSpec, rounds: tuple[int, int], service: tuple[int, int]
) -> list[str]:
    warm_up, counted = rounds
    spec = ClientSpec(**{**asdict(spec), "role": "engine"})
    with clients(spec) as engines:
        figures.nbytes["asked"] = sum(engines.nbytes)
        for number in range(warm_up + counted):
            with _memory_sampled(figures, "engine", engines, service, number < warm_up):
                pulled = engines.start("pull")
                copied = engines.start("copy")
                streamed = engines.start("raw") if figures.case.lane == "grpc" else []
                viewed = [] if figures.case.lane == "grpc" else engines.start("view")
            figures.nbytes["pulled"] = sum(each["bytes"] for each in pulled)
            figures.lanes |= {each["lane"] for each in pulled}
            if number < warm_up:
                continue
            figures.note("pull", _longest(pulled))
            figures.note("slice_copy", _longest(copied))
            for name, answers in (("raw_pull", streamed), ("view", viewed)):
                if answers:
                    figures.note(name, _longest(answers))
        _note_high_water_mark(figures, "engine", engines)
        return [str(answer["digest"]) for answer in engines.ask("digest")]


def _longest(answers: list[dict[str, Any]], name: str = "seconds") -> float:
    return max(float(answer[name]) for answer in answers)


def _make_room(admin: TrainerClient) -> None:
    """Delete the version before for good, so that the disk holds two at most."""
    admin.collect(MODEL)
    time.sleep(_GRACE_SECONDS)
    admin.collect(MODEL)


@contextmanager
def _memory_sampled(
    figures: Figures, role: str, group: Clients, service: tuple[int, int], sampled: bool
) -> Iterator[None]:
    if not sampled:
        yield
        return
    pid, start = service
    with Sampler([pid, *group.pids], [start, *group.starts]) as sampler:
        yield
        sampler.sample()
    found = {"service": sampler.peaks[0], role: max(sampler.peaks[1:]), "together": sampler.peak_sum}
    for name, nbytes in found.items():
        figures.memory[name] = max(figures.memory.get(name, 0), nbytes)


def _note_high_water_mark(figures: Figures, role: str, group: Clients) -> None:
    marks = [int(answer["high_water_mark"]) for answer in group.ask("memory")]
    figures.memory[f"{role}_high_water_mark"] = max(marks)
