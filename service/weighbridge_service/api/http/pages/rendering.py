"""Rendering of views as HTML. The template with a field's name renders the field."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from weighbridge._core.lru import Cache
from weighbridge._core.text.counts import counted, readable_count
from weighbridge._core.text.sizes import readable_size
from weighbridge_service.api.http.pages import words
from weighbridge_service.api.http.pages.viewer import Viewer
from weighbridge_service.runtime.clock import unix_ms

_FOLDER = Path(__file__).parent
_ASSETS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
_KEPT = 32 << 20
"""Maximum number of characters of cached fragments. Each fragment counts `_REMEMBERING` characters more."""
_REMEMBERING = 500
"""Overhead of a cached fragment, in characters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages link to.

    Attributes:
        content: bytes of the file.
        media_type: its media type.
        url: its path, which contains a digest of the content.
    """

    content: bytes
    media_type: str
    url: str


@cache
def assets() -> Mapping[str, Asset]:
    """The files that pages link to, by name."""
    found = {}
    for name, media_type in _ASSETS.items():
        content = (_FOLDER / "assets" / name).read_bytes()
        url = f"/assets/{hashlib.sha256(content).hexdigest()[:16]}/{name}"
        found[name] = Asset(content, media_type, url)
    return found


class Renderer:
    """Renderer of views as HTML. Thread-safe. Templates escape all values."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= {
            "size": readable_size,
            "iso": words.iso,
            "moment": words.moment,
            "count": readable_count,
            "quoted": lambda text: quote(str(text), safe=""),
        }
        self._templates.globals |= {"counted": counted, "assets": assets(), "NONE": words.NONE}
        self._known: Cache[Markup] = Cache(_KEPT, lambda html: _REMEMBERING + len(html))

    def fragments(self, kind: str, view: Any) -> dict[str, str]:
        """The fields of a view as HTML, by their names. Fields with equal values are rendered once.

        Args:
            kind: folder of the templates.
            view: the view, a frozen dataclass.
        """
        return {
            each.name: self._fragment(kind, each.name, getattr(view, each.name)) for each in dataclasses.fields(view)
        }

    def page(self, kind: str, viewer: Viewer, **values: Any) -> str:
        """A whole page.

        Args:
            kind: name of the template.
            viewer: the page's viewer.
            values: further values for the template.
        """
        return self._templates.get_template(f"{kind}.html").render(viewer=viewer, now_ms=unix_ms(), **values)

    def _fragment(self, kind: str, name: str, part: Any) -> Markup:
        key = (kind, name, _key(part))
        return self._known.get_or_make(key, lambda: self._rendered(f"{kind}/{name}.html", part))

    def _rendered(self, template: str, part: Any) -> Markup:
        return Markup(self._templates.get_template(template).render(part=part))  # noqa: S704 templates escape what they are given


def _key(part: Any) -> str:
    """Cache key of a part: a digest of its ``repr``, because some values, such as metadata, are not hashable."""
    return hashlib.blake2b(repr(part).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
