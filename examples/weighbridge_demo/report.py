"""Report of the demo, for people and for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from weighbridge import PushReport, Version
    from weighbridge_demo.megatron_cpu import Parallel
    from weighbridge_demo.tp_engine import Served
    from weighbridge_demo.trainer_ranks import Restored, Trained


@dataclass(frozen=True)
class Check:
    """One thing that had to be true.

    Attributes:
        claim: what, as a sentence.
        passed: whether it was.
        detail: the figures behind it, or what was found instead.
    """

    claim: str
    passed: bool
    detail: str = ""


@dataclass
class Report:
    """Results of the demo, filled in while it runs.

    Attributes:
        model: name of the model.
        model_bytes: bytes of all its tensors.
        imported: report of pushing the Hugging Face folder, and the version of that push.
        restored: for each parallelism, the results of each rank.
        trained: results of each rank of the trainer.
        engines: results of the ranks of each engine, by the engine's name.
        full_pull: bytes, seconds and lane of pulling the whole trained model.
        texts: continuations of the prompt, each with the name of its source.
        checks: conditions that had to hold.
        stages: seconds that each part of the demo took, the start and end of processes included.
        error: why the demo stopped early; empty if it reached its end.
    """

    model: str = ""
    model_bytes: int = 0
    imported: tuple[PushReport, Version] | None = None
    restored: list[tuple[Parallel, list[Restored]]] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    engines: dict[str, list[Served]] = field(default_factory=dict)
    full_pull: tuple[int, float, str] | None = None
    texts: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def check(self, claim: str, passed: bool, detail: str = "") -> None:
        """Record whether something was as it had to be."""
        self.checks.append(Check(claim, passed, detail))

    @contextmanager
    def stage(self, say: Callable[[str], None], what: str) -> Iterator[None]:
        """Record how long a part of the demo takes. Calls ``say`` when the part begins and when it ends."""
        say(what)
        started = time.monotonic()
        yield
        self.stages[what] = round(time.monotonic() - started, 3)
        say(f"  {self.stages[what]:.1f} s")

    @property
    def failures(self) -> list[str]:
        """Failed checks and the error, if any; empty if the demo passed."""
        failed = [f"{check.claim}: {check.detail}" for check in self.checks if not check.passed]
        return failed + ([self.error] if self.error else [])

    @property
    def losses(self) -> list[float]:
        """The loss before each step of the trainer."""
        for rank in self.trained:
            if rank.losses and rank.losses[0] is not None:
                return [loss for loss in rank.losses if loss is not None]
        return []

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; sizes in bytes, times in seconds."""
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "model": self.model,
            "model_bytes": self.model_bytes,
            "import": _push_json(*self.imported) if self.imported else None,
            "restored": [
                {"parallel": asdict(parallel), "ranks": [asdict(rank) for rank in ranks]}
                for parallel, ranks in self.restored
            ],
            "losses": self.losses,
            "step_seconds": self.trained[0].step_seconds if self.trained else [],
            "pushed": [_push_json(rank.pushed, rank.version) for rank in self.trained],
            "engines": {name: [asdict(rank) for rank in ranks] for name, ranks in self.engines.items()},
            "full_pull": dict(zip(("nbytes", "seconds", "lane"), self.full_pull, strict=True))
            if self.full_pull
            else None,
            "texts": self.texts,
            "checks": [asdict(check) for check in self.checks],
            "stages": self.stages,
            "seconds": sum(self.stages.values()),
        }


def ready_seconds(version: Version) -> float:
    """Seconds from the opening of a version until engines could pull it."""
    return (version.ready_time_ms - version.create_time_ms) / 1000


def durable_seconds(version: Version) -> float:
    """Seconds from the opening of a version until it lay in the object store."""
    return (version.durable_time_ms - version.create_time_ms) / 1000


def _push_json(push: PushReport, version: Version) -> dict[str, Any]:
    times = {"ready_seconds": ready_seconds(version), "durable_seconds": durable_seconds(version)}
    return {**asdict(push), "version": version.number, **times}


def print_report(report: Report, console: Console) -> None:
    """Write what moved, how fast, what was said and what was checked; the last line is the verdict."""
    if report.imported:
        console.print(_moved(report))
        console.print(_versions(report))
    if report.trained:
        console.print(_training(report))
    if report.texts:
        console.print(_texts(report.texts))
    if report.checks:
        console.print(_checks(report.checks))
    if report.failures:
        print_failures(report, console)
    else:
        console.print("demo passed", style="bold green")


def print_failures(report: Report, console: Console) -> None:
    """Write what was not as it had to be, and the verdict."""
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", highlight=False, markup=False)
    console.print("demo failed", style="bold red")


def _moved(report: Report) -> Table:
    """One line for each transfer."""
    table = _table(
        "What moved, and how fast",
        ("transfer", "bytes per rank", "of the model", "seconds", "MB/s in all", "lane"),
    )

    def line(what: str, sizes: Sequence[int], seconds: float, lanes: Iterable[str]) -> None:
        share = " to ".join(dict.fromkeys(f"{size / report.model_bytes:.0%}" for size in (min(sizes), max(sizes))))
        megabytes = " to ".join(dict.fromkeys(f"{size / 1e6:.1f} MB" for size in (min(sizes), max(sizes))))
        speed = f"{sum(sizes) / 1e6 / seconds:.0f}"
        table.add_row(what, megabytes, share, f"{seconds:.2f}", speed, "+".join(sorted({*lanes})))

    if report.imported:
        push, _ = report.imported
        seconds = push.held_seconds + push.stream_seconds
        line("import: the folder", [push.stream_bytes], seconds, [push.lane])
    for parallel, ranks in report.restored:
        what = f"restore: Megatron TP {parallel.tp} x PP {parallel.pp}"
        line(what, [rank.nbytes for rank in ranks], max(rank.seconds for rank in ranks), ["grpc"])
    if report.trained:
        pushes = [rank.pushed for rank in report.trained]
        line(
            f"push: {len(pushes)} trainer ranks",
            [push.stream_bytes for push in pushes],
            max(push.held_seconds + push.stream_seconds for push in pushes),
            [push.lane for push in pushes],
        )
    for name, engine in report.engines.items():
        sizes, seconds = [rank.nbytes for rank in engine], max(rank.seconds for rank in engine)
        line(f"pull: {name}, TP {len(engine)}", sizes, seconds, [rank.lane for rank in engine])
    if report.full_pull:
        nbytes, seconds, lane = report.full_pull
        line("pull: whole tensors", [nbytes], seconds, [lane])
    return table


def _versions(report: Report) -> Table:
    """Seconds that pushes held their ranks, and seconds from the opening of each version until it was ready and
    durable.
    """
    table = _table(
        "How long pushing took, in seconds",
        ("version", "ranks", "held up for", "of it copying", "can be pulled after", "is durable after"),
    )

    def line(pushes: Sequence[PushReport], version: Version) -> None:
        held = max(pushes, key=lambda push: push.held_seconds)
        times = (held.held_seconds, held.copy_seconds, ready_seconds(version), durable_seconds(version))
        table.add_row(str(version.number), str(len(pushes)), *(f"{seconds:.2f}" for seconds in times))

    if report.imported:
        push, version = report.imported
        line([push], version)
    if report.trained:
        line([rank.pushed for rank in report.trained], report.trained[0].version)
    return table


def _training(report: Report) -> Table:
    table = _table("Training", ("step", "loss", "seconds"))
    for step, (loss, seconds) in enumerate(zip(report.losses, report.trained[0].step_seconds, strict=True), 1):
        table.add_row(str(step), f"{loss:.4f}", f"{seconds:.2f}")
    return table


def _texts(texts: Mapping[str, str]) -> Table:
    from rich.markup import escape

    table = _table("How the prompt goes on", ("who", "says"))
    for who, text in texts.items():
        table.add_row(who, escape(repr(text)))
    return table


def _checks(checks: Iterable[Check]) -> Table:
    from rich.markup import escape

    table = _table("Checked", ("", "claim", "figures"))
    for check in checks:
        table.add_row("yes" if check.passed else "NO", escape(check.claim), escape(check.detail))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table
