"""``python -m docs.words``: turns of phrase in docstrings, comments, messages and documents for which the field has a
term.

Prints ``file:line: phrase: the line`` for each place, and ends with 1 if there is one. Rewrite the sentence, not the
word: subject, verb, object; the actor named; one idea. A place that has to stay goes into `EXCEPTIONS`, with the
reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("clients", "service", "storage", "docs", "README.md", "SECURITY.md")
ENDINGS = frozenset({".py", ".md", ".c", ".h", ".proto", ".html"})
PHRASES = {
    "whoever, nobody, somebody: name the actor": r"\b([Ww]hoever|[Nn]obody|[Ss]omebody)\b",
    "who as a subject: name the actor": r'(^|[.:;] |""")Who (?!am\b)\w+',
    "told, said, word: receives, is notified, reports, returns": r"\b(is|are|was|were|be|been) told\b|\bword (to|that|from)\b"
    r"|\bwithout a word\b|\bwhat is said\b|\bsaid of\b",
    "in vain, of before, all the same, by itself": r"\bin vain\b|\bof before\b|\ball the same\b|\bit by itself\b",
    "is had, goes by, speaks for, is at it, comes of": r"\b(is|are|be|was) had\b|\bgoes by\b|\bspeaks? for\b|\bis at it\b"
    r"|\bcomes? of\b|\bmade of\b.*\bof which\b",
    "none that, is none, no other one": r"\bnone that\b|\bis none of\b|\bis no other\b|\bthat are none\b",
    "the one before, what it is of, those of it": r"\bthe one before\b|\bwhat (they|it) (is|are) of\b|\bthose of it\b",
    "let go, take note, lend: release, record, grant": r"\blets? go\b|\b[Tt]akes? note\b|\b(lent|lend|lends)\b",
    "a docstring begins with the noun": r'"""(What|Who|How|Where|Which|Why)\b',
    "likewise, thereby: say the relation, or nothing": r"\b([Ll]ikewise|[Tt]hereby)\b",
}
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("docs/words.py", ""): "names the phrases",
}
"""For a file and a part of a line in it, the reason why the line stays."""


def main() -> int:
    """Prints the places, and counts them."""
    found = list(places(FOLDERS))
    sys.stdout.writelines(f"{line}\n" for line in [*found, f"{len(found)} places"])
    return 1 if found else 0


def places(names: Sequence[str]) -> Iterator[str]:
    """Places below files and folders of the checkout, without exceptions."""
    patterns = {phrase: re.compile(pattern) for phrase, pattern in PHRASES.items()}
    for path in sorted(path for name in names for path in _files(ROOT / name)):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if any(name == file and part in line for file, part in EXCEPTIONS):
                continue
            for phrase, pattern in patterns.items():
                if pattern.search(line):
                    yield f"{name}:{number}: {phrase}: {line.strip()[:160]}"


def _files(path: Path) -> Iterator[Path]:
    """Files with words in or at a path, without generated ones."""
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.suffix in ENDINGS and "_pb2" not in each.name and each.is_file():
            yield each


if __name__ == "__main__":
    sys.exit(main())
