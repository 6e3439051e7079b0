"""Does the README fit on a screen, and do it and the pages show only commands that exist?"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from docs.website import pages
from weighbridge._cli import commands as group

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
MOST_LINES, MOST_LINKS = 56, 8
SOURCES = [source for source in pages.sources() if source != "CHANGELOG.md"]
_FENCED = re.compile(r"^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```", re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Words of each call of `weighbridge` in the blocks of shell lines of a page, comments left out."""
    found = []
    for block in _FENCED.finditer(text):
        shell = block["language"] in ("", "bash", "sh")
        for line in block["code"].replace("\\\n", " ").splitlines() if shell else ():
            if line.startswith("weighbridge "):
                words = shlex.split(line, comments=True)
                found.append(words[1 : words.index("|")] if "|" in words else words[1:])
    return found


def options(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def test_the_readme_is_one_screen_with_eight_links_at_most() -> None:
    assert len(README.splitlines()) <= MOST_LINES, "what users need besides has its page in docs/"
    assert len(list(pages.links(README))) <= MOST_LINKS


def test_the_readme_names_make_targets_and_examples_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^make ([\w-]+)", README, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert examples == set(re.findall(r"`(examples/[\w.]+)`", README)), "the README names each example"


@pytest.mark.parametrize("source", SOURCES)
def test_commands_on_a_page_exist_with_their_options(source: str) -> None:
    wrong = []
    with click.Context(group) as context:
        for words in commands((ROOT / source).read_text("utf-8")):
            if words[0].startswith("-"):
                continue
            command = group.get_command(context, words[0])
            known = options(command) if command else set()
            given = {word.partition("=")[0] for word in words[1:] if word.startswith("--") and word != "--"}
            if command is None or given - known:
                wrong.append(" ".join(words))
    assert wrong == [], f"{source} shows calls that do not exist"
