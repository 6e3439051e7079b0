"""Run of the demo: what it needs, where it works, how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from weighbridge.errors import FailedPrecondition, InvalidArgument, WeighbridgeError

_NEEDED = ("torch", "megatron", "mbridge", "transformers", "gguf", "accelerate", "fastapi")


def run_demo(
    work_dir: Path | None,
    steps: int,
    as_json: bool,
    store: str | None = None,
    vllm: Path | None = None,
    keep: bool = False,
) -> int:
    """Train, push, pull and generate with a real language model on this machine.

    Starts processes of its own (a service, trainer ranks, engine ranks) and ends them, whatever happens.

    Args:
        work_dir: a new or empty folder, kept in the end; a temporary one if None.
        steps: optimizer steps of the trainer, at least one.
        as_json: print one JSON document and nothing else.
        store: where the service keeps versions, a folder or ``s3://bucket/prefix``; in ``work_dir`` if None.
        vllm: the Python of an environment with vLLM: its servers follow the trainer, instead of engines of the demo's
            own.
        keep: leave the service running when all is done, until this process is interrupted; ends at once where
            something was not as it had to be.

    Returns:
        The exit code: 0 if everything was as it had to be.
    """
    from rich.console import Console

    from weighbridge_demo.keeping import Kept, say_how_to_keep
    from weighbridge_demo.report import Report, print_failures, print_report

    console = Console(width=None if sys.stdout.isatty() else 140)
    report = Report()
    started = time.monotonic()

    def say(line: str) -> None:
        if not as_json:
            console.print(f"{time.monotonic() - started:6.1f}  {line}", highlight=False, markup=False, soft_wrap=True)

    def print_all() -> None:
        if as_json:
            document = json.dumps(report.to_json(), indent=2)
            console.print(document, highlight=False, markup=False, soft_wrap=True)
        else:
            print_report(report, console)

    kept = Kept(report, print_all, temporary=work_dir is None) if keep else None
    try:
        with _sigterm_interrupts(), _work_folder(work_dir) as work:
            _check_needs(steps)
            # The bar that shows a GGUF file being read has no other switch.
            os.environ.setdefault("TQDM_DISABLE", "1")
            with warnings.catch_warnings(action="ignore"):  # megatron-core lists what a CPU machine lacks
                from weighbridge_demo.story import Story
                from weighbridge_demo.vllm_story import VllmStory
            if vllm is None:
                Story(work, steps, say, report, store, kept).tell()
            else:
                VllmStory(work, steps, vllm, say, report, kept).tell()
    except KeyboardInterrupt:
        report.error = "interrupted"
    except WeighbridgeError as error:
        report.error = str(error)
    except Exception:
        report.error = traceback.format_exc()
    if kept is None or not kept.printed:
        print_all()
        if not as_json and not report.failures:
            say_how_to_keep(console)
    elif report.failures:
        print_failures(report, console)
    return 1 if report.failures else 0


def _check_needs(steps: int) -> None:
    """Raise where the demo could not reach its end."""
    from weighbridge_demo.language_model import find_gguf

    if steps < 1:
        raise InvalidArgument(f"the trainer cannot take {steps} steps", fix="ask for at least one")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPrecondition(
            f"the demo needs what is not installed: {', '.join(missing)}",
            fix="pip install 'weighbridge[demo]'",
        )
    find_gguf()


@contextmanager
def _work_folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="weighbridge-demo-") as folder:
            yield Path(folder)
        return
    if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise InvalidArgument(f"{wanted} exists and is not an empty folder", fix="name a new folder")
    wanted.mkdir(parents=True, exist_ok=True)
    yield wanted


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: with all its processes."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
