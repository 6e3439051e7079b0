"""One case of a benchmark: what a push and a pull of a model cost, given its size, the number of clients, the cut and
the lane.

Each round measures a push and its yardsticks one after the other, and later a pull and its own, so that all of a round
were measured under the same load. The code of several checkouts can take turns in each round. The first rounds warm up;
memory is sampled in them and their times do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
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
    """One case to measure.

    Attributes:
        gigabytes: about how large the model is.
        clients: number of trainer ranks that push, and of engines that pull.
        cut: one of `benchmarks.cuts.CUTS`.
        lane: ``grpc`` or ``local``.
        device: device of the clients' tensors, ``cpu`` or ``cuda``.
    """

    gigabytes: float
    clients: int
    cut: str
    lane: str
    device: str = "cpu"


@dataclass
class Figures:
    """Measurements of a case.

    Attributes:
        case: the case.
        seconds: by name, one value for each round; of the client that took longest. ``sealed`` is from the end of the
            last rank's copy until the version is ready. ``push_processor`` and ``pull_processor`` are
            what the service and all clients computed for a push, until it was durable, and for a pull.
        nbytes: ``model``, ``pushed`` and ``arrived`` of one push, ``asked`` and ``pulled`` of one pull, of all clients
            together.
        memory: bytes beyond the start: ``service``, ``trainer``, ``engine`` (of a process, the largest) and
            ``together`` as proportional sets, ``*_high_water_mark`` as resident ones.
        lanes: lanes that were taken.
        verified: whether engines had the very bytes that trainers pushed; None if slices and shards are cut
            differently.
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
    before: Callable[[TrainerClient], None] = lambda _admin: None,
    pulls: bool = True,
) -> Figures:
    """Measure a case with a service of its own.

    Args:
        case: the case.
        rounds: number of rounds that count.
        folder: an empty folder for the store, whose content is not needed afterwards.
        while_serving: called with the service when one version is durable and clients are gone.
        warm_up: number of rounds before those that count; a service needs two until it has all its buffers.
        before: called with a client when the model is registered and nothing has been pushed.
        pulls: whether engines pull, too.

    Raises:
        ClientError: a client failed.
    """
    with _Side.open(case, folder, None) as side:
        before(side.admin)
        pushed = _push_rounds([side], warm_up, rounds)
        if pulls:
            _verify([side], pushed, _pull_rounds([side], warm_up, rounds))
        while_serving(side.service)
        return side.figures


def run_in_turn(
    case: Case, rounds: int, folder: Path, checkouts: Sequence[Path | None], *, warm_up: int = 2
) -> list[Figures]:
    """Measure a case with the code of several checkouts, which take turns in each round; others begin in each.

    Args:
        case: the case.
        rounds: number of rounds that count.
        folder: an empty folder for the stores.
        checkouts: roots of the checkouts; None is the code of this process.
        warm_up: as for `run_case`.

    Returns:
        The figures of each checkout; what has the same index in their lists was measured in one round.

    Raises:
        ClientError: a client failed.
    """
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_Side.open(case, folder / str(number), checkout))
            for number, checkout in enumerate(checkouts)
        ]
        pushed = _push_rounds(sides, warm_up, rounds)
        _verify(sides, pushed, _pull_rounds(sides, warm_up, rounds))
    return [side.figures for side in sides]


@dataclass(frozen=True)
class _Side:
    """A service that a case is measured with.

    Attributes:
        figures: measurements so far.
        checkout: checkout whose code it and its clients run; None for that of this process.
        spec: specification of its trainers.
        service: address of the service.
        admin: a client of it.
        start: memory that it had in the beginning, in bytes.
    """

    figures: Figures
    checkout: Path | None
    spec: ClientSpec
    service: processes.Service
    admin: TrainerClient
    start: int

    @staticmethod
    @contextmanager
    def open(case: Case, folder: Path, checkout: Path | None) -> Iterator[_Side]:
        """A service over a new store in an empty folder, where the model is registered."""
        figures = Figures(case)
        config = models.write_config(models.config_of(case.gigabytes), folder / "hf")
        specs = models.hugging_face_specs(config)
        models.write_specs(specs, folder / "specs.json")
        figures.nbytes["model"] = sum(spec.nbytes for spec in specs)
        with (
            processes.raw_grpc_server(checkout) as raw,
            processes.service(folder, figures.nbytes["model"], checkout=checkout) as service,
            TrainerClient(service.grpc) as admin,
        ):
            admin.register_model(MODEL, folder / "hf")
            admin.set_retention(MODEL, Retention(keep_last=1))
            start = memory_of(service.pid).proportional
            spec = ClientSpec(
                "trainer", service.grpc, raw, str(folder / "specs.json"), case.cut, case.lane, case.clients, 0,
                case.device,
            )  # fmt: skip
            yield _Side(figures, checkout, spec, service, admin, start)

    def push(self, trainers: Clients, number: int, *, counted: bool) -> None:
        """Push once, and measure the yardsticks. ``number`` is the step."""
        figures = self.figures
        with self._memory_sampled("trainer", trainers, not counted):
            copied = trainers.start("copy")
            computed = self._processor_seconds(trainers)
            pushed = trainers.start("push", step=number)
            computed = self._processor_seconds(trainers) - computed
            streamed = trainers.start("raw") if figures.case.lane == "grpc" else []
        figures.nbytes["pushed"] = sum(each["bytes"] for each in pushed)
        figures.nbytes["arrived"] = pushed[0]["version_bytes"]
        figures.lanes |= {each["lane"] for each in pushed}
        if not counted:
            return
        first_byte = min(each["first_byte"] for each in pushed)
        figures.note("copy", _longest(copied))
        figures.note("held", _longest(pushed, "held"))
        figures.note("called", _longest(pushed, "called"))
        figures.note("stream", _longest(pushed, "stream"))
        figures.note("ready", min(each["ready"] for each in pushed) - first_byte)
        if all("last_byte" in each for each in pushed):  # another checkout may not tell
            last_byte = max(each["last_byte"] for each in pushed)
            figures.note("sealed", min(each["ready"] for each in pushed) - last_byte)
        figures.note("durable", pushed[0]["durable"] - first_byte)
        figures.note("push_processor", computed)
        if streamed:
            figures.note("raw_push", _longest(streamed))

    def pull(self, engines: Clients, *, counted: bool) -> None:
        """Pull once, and measure the yardsticks."""
        figures = self.figures
        over_grpc = figures.case.lane == "grpc"
        with self._memory_sampled("engine", engines, not counted):
            computed = self._processor_seconds(engines)
            pulled = engines.start("pull")
            computed = self._processor_seconds(engines) - computed
            copied = engines.start("copy")
            streamed = engines.start("raw") if over_grpc else []
            viewed = [] if over_grpc else engines.start("view")
        figures.nbytes["pulled"] = sum(each["bytes"] for each in pulled)
        figures.lanes |= {each["lane"] for each in pulled}
        if not counted:
            return
        figures.note("pull", _longest(pulled))
        figures.note("slice_copy", _longest(copied))
        figures.note("pull_processor", computed)
        for name, answers in (("raw_pull", streamed), ("view", viewed)):
            if answers:
                figures.note(name, _longest(answers))

    def note_high_water_mark(self, role: str, group: Clients) -> None:
        """Note the most memory that one of the clients had."""
        marks = [int(answer["high_water_mark"]) for answer in group.ask("memory")]
        self.figures.memory[f"{role}_high_water_mark"] = max(marks)

    def _processor_seconds(self, group: Clients) -> float:
        return processes.processor_seconds(self.service.pid) + group.processor_seconds

    @contextmanager
    def _memory_sampled(self, role: str, group: Clients, sampled: bool) -> Iterator[None]:
        if not sampled:
            yield
            return
        with Sampler([self.service.pid, *group.pids], [self.start, *group.starts]) as sampler:
            yield
            sampler.sample()
        found = {"service": sampler.peaks[0], role: max(sampler.peaks[1:]), "together": sampler.peak_sum}
        memory = self.figures.memory
        for name, nbytes in found.items():
            memory[name] = max(memory.get(name, 0), nbytes)


def _verify(sides: Sequence[_Side], pushed: list[list[str]], pulled: list[list[str]]) -> None:
    for side, digests, expected in zip(sides, pulled, pushed, strict=True):
        if side.figures.case.cut != "megatron":
            side.figures.verified = digests == expected


def _push_rounds(sides: Sequence[_Side], warm_up: int, rounds: int) -> list[list[str]]:
    """Push with each side in turn; digests of what the ranks of each had in the end."""
    with ExitStack() as stack:
        groups = [(side, stack.enter_context(clients(side.spec, checkout=side.checkout))) for side in sides]
        for number in range(warm_up + rounds):
            for side, trainers in _others_first(groups, number):
                side.push(trainers, number + 1, counted=number >= warm_up)
            _make_room([side.admin for side in sides])
        return _end(groups, "trainer")


def _pull_rounds(sides: Sequence[_Side], warm_up: int, rounds: int) -> list[list[str]]:
    """Pull with each side in turn; digests of what the engines of each had in the end."""
    with ExitStack() as stack:
        groups = [
            (side, stack.enter_context(clients(replace(side.spec, role="engine"), checkout=side.checkout)))
            for side in sides
        ]
        for side, engines in groups:
            side.figures.nbytes["asked"] = sum(engines.nbytes)
        for number in range(warm_up + rounds):
            for side, engines in _others_first(groups, number):
                side.pull(engines, counted=number >= warm_up)
        return _end(groups, "engine")


def _others_first(groups: Sequence[tuple[_Side, Clients]], number: int) -> Iterator[tuple[_Side, Clients]]:
    """All of them, beginning with another one in each round."""
    first = number % len(groups)
    yield from (*groups[first:], *groups[:first])


def _end(groups: Sequence[tuple[_Side, Clients]], role: str) -> list[list[str]]:
    """Note the most memory that clients had; digests of what they have."""
    found = []
    for side, group in groups:
        side.note_high_water_mark(role, group)
        found.append([str(answer["digest"]) for answer in group.ask("digest")])
    return found


def _longest(answers: list[dict[str, Any]], name: str = "seconds") -> float:
    return max(float(answer[name]) for answer in answers)


def _make_room(admins: Sequence[TrainerClient]) -> None:
    """Delete the versions before for good, so that the disk holds two of each model at most."""
    for admin in admins:
        admin.collect(MODEL)
    time.sleep(_GRACE_SECONDS)
    for admin in admins:
        admin.collect(MODEL)
