"""Does a terminal show the output of commands as plain text, also text from other users, and does it fit the width?"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import replace

import pytest
from rich.cells import cell_len

from weighbridge._cli.following import _BESIDES, _engine_row
from weighbridge._cli.output import (
    PlainFormatter,
    print_error,
    print_json,
    print_table,
    progress_bar,
    progress_phases,
    say,
)
from weighbridge._cli.pushing import phase_of
from weighbridge._core.engines.facts import Engine
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import Unavailable

BAD = "x\x1b]0;title\x07\x9b2J\u202e\r"
OBEYED = set("\x1b\x07\x9b\u202e\r")


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make the output code see a terminal of this many columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


def unstyled(text: str) -> str:
    return re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text)


def test_nothing_that_is_printed_is_obeyed_by_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NOTE",), [(BAD,)])
    say(BAD)
    print_json({BAD: BAD}, one_line=True)
    print_error(Unavailable(BAD, fix=BAD, details=[BAD]), as_json=False)
    print_error(Unavailable(BAD), as_json=True)
    print(PlainFormatter().format(logging.makeLogRecord({"msg": BAD})))
    said = capsys.readouterr()
    assert said.out.count("title") == 6
    assert not OBEYED & set(said.out + said.err)
    assert said.err.splitlines()[-1].startswith("  What to do: x")
    assert json.loads(said.out.splitlines()[3]) == {BAD: BAD}, "programs get it as it is"


def test_what_others_have_written_makes_no_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    say("acme/smol@17: failed: one\nacme/smol@18: all is well")
    assert capsys.readouterr().out == "acme/smol@17: failed: one acme/smol@18: all is well\n"
    print_error(Unavailable("one\n  What to do: nothing", fix="that"), as_json=False)
    assert capsys.readouterr().err == "Error: one\n      What to do: nothing\n  What to do: that\n"


def test_a_push_says_which_phase_it_is_in() -> None:
    version = Version("acme/smol", 3, VersionState.OPEN, waits_for=("memory",), tensor_bytes=100)
    states = [
        version,
        replace(version, state=VersionState.RECEIVING, received_bytes=40),
        *(replace(version, state=each, received_bytes=100) for each in (VersionState.READY, VersionState.VERIFIED)),
    ]
    assert [phase_of(each) for each in states] == [
        ("waiting for memory", 0, 0),
        ("copying", 40, 100),
        ("verifying", 0, 0),
        ("storing", 0, 0),
    ]


def test_phases_are_named_at_a_terminal_and_count_only_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with progress_phases("pushing acme/smol", "registering") as update:
        update("copying", 40_000_000, 100_000_000)
    with progress_phases("pushing acme/smol", "registering") as update:
        update("storing", 0, 0)
    copying, storing = unstyled(capsys.readouterr().err).rsplit("pushing acme/smol: copying", 1)
    assert "40.0 MB of 100.0 MB" in storing.split("pushing acme/smol: storing")[0]
    assert "pushing acme/smol: storing" in storing
    assert "?" not in copying + storing


def test_a_bar_of_progress_names_it_as_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(BAD) as update:
        update(1, 2)
    shown = unstyled(capsys.readouterr().err)
    assert "title" in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)


ENGINES = [
    Engine(
        "e1", "acme/smol", "vllm", "http://10.0.0.7:8000", "live", 16, state="failing", standing="behind", behind=1, named=17,
        error="no memory for 17: " + "layer " * 30, update_version=16, update_bytes=3_200_000_000, update_prepare_seconds=3.4,
        update_pause_seconds=0.21, update_time_ms=int(time.time() * 1000) - 200_000,
    ),
    Engine("e2", "acme/smol", "sglang", "http://10.0.0.8:30000", "live", 17, state="serving", standing="current", named=17),
]  # fmt: skip


def engines() -> None:
    print_table(
        ("ENGINE", "MODEL", "SERVES", "STANDING", "STATE", *_BESIDES),
        [_engine_row(each, time.time() * 1000) for each in ENGINES],
        below=_BESIDES,
    )


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_engines_fit_a_terminal_and_nothing_is_left_out(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, columns)
    engines()
    text = unstyled(capsys.readouterr().out)
    assert max(map(cell_len, text.splitlines())) <= columns
    if columns >= 80:
        first = text.splitlines()[1]
        assert re.search(r"^vllm at (http://10\.0\.0\.7:8000)? +acme/smol +16 +1 version behind +failing,", first)
    words = text.split()
    assert words.count("layer") == 30
    assert "paused for 210 ms" in " ".join(words)


def test_where_there_is_room_an_engine_has_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, 400)
    engines()
    lines = unstyled(capsys.readouterr().out).splitlines()
    assert len(lines) == 3
    assert lines[0].rstrip().endswith("NOTE")


def test_without_a_terminal_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "NOTE"), [("w" * 500, "n" * 500)], below=("NOTE",))
    assert len(capsys.readouterr().out.splitlines()) == 2
