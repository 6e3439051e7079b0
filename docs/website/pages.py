"""Pages of the site that are files of the repository: where each goes, and its links there.

A link of a page leads to a file beside it, so that it works where the repository is read. On the site it leads to that
file's page. Files that are no pages are not on the site: of a link to one, its text stays.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ELSEWHERE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "deployment.md",
}
"""Pages that are not in docs/."""
_MEANT = {"protos/weighbridge/v1": "reference/grpc.md"}
"""Subjects without a page of their own, each with the page that covers it."""
_LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[[^]]*\]\((?P<target>[^)\s#:]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def sources() -> Mapping[str, str]:
    """The pages: paths within the repository, and those of their pages on the site."""
    docs = ROOT / "docs"
    found = {f"docs/{path}": path for path in sorted(str(each.relative_to(docs)) for each in docs.rglob("*.md"))}
    return found | _ELSEWHERE


def on_site(text: str, source: str, placed: Mapping[str, str]) -> str:
    """A page's text with its links as they are on the site.

    Args:
        text: Markdown.
        source: its path within the repository.
        placed: as `sources` gives it.
    """
    here = os.path.dirname(placed[source])
    known = {**placed, **_MEANT}

    def led(link: re.Match[str]) -> str:
        page = known.get(_resolved(source, link["target"]))
        if page is None:
            return link["text"]
        return f"[{link['text']}]({os.path.relpath(page, here or '.')}{link['anchor'] or ''})"

    return "".join(part if fenced else _LINK.sub(led, part) for part, fenced in _parts(text))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Targets and anchors of a page's links to files of the repository, outside of code; a target is empty if the link
    stays on its page.
    """
    outside = "".join(part for part, fenced in _parts(text) if not fenced)
    for found in re.finditer(r"\[[^]]*\]\((?P<target>[^)\s#:]*)(?:#(?P<anchor>[^)\s]*))?\)", outside):
        yield found["target"], found["anchor"] or ""


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as forges and the site name them."""
    outside = "".join(part for part, fenced in _parts(text) if not fenced)
    found = set[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", outside, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w -]", "", plain).replace(" ", "-"))
    return found


def pictures(text: str) -> Iterator[str]:
    """Targets of a page's pictures."""
    return (found["target"] for found in _IMAGE.finditer(text))


def stage(to: Path) -> None:
    """Write the pages, and the pictures that they show, as the site has them."""
    placed = sources()
    for source, page in placed.items():
        text = (ROOT / source).read_text("utf-8")
        path = to / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(on_site(text, source, placed), "utf-8")
        for picture in pictures(text):
            drawn = path.parent / picture
            drawn.parent.mkdir(parents=True, exist_ok=True)
            drawn.write_bytes(((ROOT / source).parent / picture).read_bytes())


def _resolved(source: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """A page in parts that are code in fences, or not."""
    end = 0
    for fenced in _FENCED.finditer(text):
        yield text[end : fenced.start()], False
        yield fenced[0], True
        end = fenced.end()
    yield text[end:], False
