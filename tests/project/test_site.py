"""Is the documentation's site whole: its pages, their links, the names that it tells of, and its pictures of what was
recorded?
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml

import weighbridge
from docs.website import commands, contract, http_api, pages, pictures, python_api
from weighbridge._cli import _MODULE_OF

ROOT = Path(__file__).parents[2]
SOURCES = list(pages.sources())
GENERATED = {"commands", "http", "grpc", *python_api.PAGES}
CONTRACT = [
    importlib.import_module(f"weighbridge.v1.{path.stem}_pb2")
    for path in (ROOT / "protos" / "weighbridge" / "v1").glob("*.proto")
]


class _Settings(yaml.SafeLoader):
    """Of mkdocs.yml: names of Python's functions are left as they are written."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def listed(navigation: list[Any]) -> list[str]:
    found = []
    for entry in navigation:
        for inner in entry.values() if isinstance(entry, dict) else [entry]:
            found += [inner] if isinstance(inner, str) else listed(inner)
    return found


def test_the_navigation_lists_each_page_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Settings)
    made = [*pages.sources().values(), *(f"reference/{name}.md" for name in GENERATED)]
    assert sorted(listed(settings["nav"])) == sorted(made), "give each page its place in mkdocs.yml"


@pytest.mark.parametrize("source", SOURCES)
def test_links_lead_to_files_and_headings_that_there_are(source: str) -> None:
    path = ROOT / source
    for target, anchor in pages.links(path.read_text("utf-8")):
        found = path.parent / target if target else path
        assert found.exists(), f"{source} links to {target}"
        if anchor:
            assert anchor in pages.anchors(found.read_text("utf-8")), f"{source} links to {target}#{anchor}"


def test_links_on_the_site_lead_to_pages_and_others_become_text() -> None:
    placed = {"docs/a.md": "a.md", "docs/recipes/b.md": "recipes/b.md", "CHANGELOG.md": "changelog.md"}
    text = (
        "[a](../a.md#part), [log](../../CHANGELOG.md), [web](https://x.org/y)\n```\n[c](c.md)\n```\n"
        "[code](../../tests/x.py) [here](#part)"
    )
    assert pages.on_site(text, "docs/recipes/b.md", placed) == (
        "[a](../a.md#part), [log](../changelog.md), [web](https://x.org/y)\n```\n[c](c.md)\n```\ncode [here](#part)"
    )


def test_anchors_are_those_that_forges_make() -> None:
    text = "# A `code` heading, with a [link](x.md)\n\n```\n# no heading\n```\n## Where a thing is (and why)\n"
    assert pages.anchors(text) == {"a-code-heading-with-a-link", "where-a-thing-is-and-why"}


def test_each_public_name_of_the_sdk_is_on_one_page() -> None:
    told = [
        name.removeprefix("weighbridge.")
        for page in python_api.PAGES.values()
        for names in page.names.values()
        for name in names
    ]
    assert len(told) == len(set(told))
    public = {name for name in told if "." not in name}
    assert public == set(weighbridge.__all__), "give each module its place in docs/website/python_api.py"


def test_each_command_is_told_as_it_tells_of_itself() -> None:
    page = commands.page()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(_MODULE_OF)
    for name in _MODULE_OF:
        assert f"Usage: weighbridge {name}" in page


@pytest.mark.process
def test_each_call_message_and_value_of_the_contract_is_told() -> None:
    page = contract.page()
    for module in CONTRACT:
        described = module.DESCRIPTOR
        for service in described.services_by_name.values():
            assert f"## {service.name}\n" in page
            assert all(f"\n| `{method.name}` | " in page for method in service.methods)
        for message in described.message_types_by_name.values():
            assert f"### {message.name} {{" in page
            assert all(f"\n| `{field.name}` = {field.number} | " in page for field in message.fields)
        for enum in described.enum_types_by_name.values():
            assert all(f"\n| `{value.name}` = {value.number} | " in page for value in enum.values)
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(re.findall(r"\{ #([\w-]+) \}", page))


@pytest.mark.process
def test_each_route_of_the_http_interface_is_told_with_its_bodies() -> None:
    described = http_api.document()
    page = http_api.page(described)
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert f"### `{method.upper()} {path}` " in page
            assert operation["description"] in page
    assert all(f"\n### {name} " in page for name in described["components"]["schemas"])
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(re.findall(r"\{ #([\w-]+)[ }]", page))


def test_pictures_are_what_the_recorded_figures_give() -> None:
    drawn = pictures.drawn()
    kept = {path.name: path.read_text("utf-8") for path in pictures.FOLDER.glob("*.svg")}
    assert kept == drawn, "run `make pictures`"
    shown = {Path(picture).name for source in SOURCES for picture in pages.pictures((ROOT / source).read_text("utf-8"))}
    assert {name for name in shown if name.endswith(".svg")} == set(drawn)
    assert all((ROOT / "docs" / "images" / name).exists() for name in shown - set(drawn))


def test_a_picture_says_its_figures_and_where_they_are_from() -> None:
    record = json.loads((pictures.RESULTS / "2026-11-22-2-cores-peers.json").read_text("utf-8"))
    picture = ET.fromstring(pictures.drawn()["peers.svg"])
    space = {"svg": "http://www.w3.org/2000/svg"}
    texts = [each.text or "" for each in picture.findall("svg:text", space)]
    series = record["comparisons"][0]["series"]
    for name, label in (
        ("DCP save", "torch DCP save"),
        ("weighbridge push, ready", "push: engines can pull it"),
    ):
        assert texts[texts.index(label) + 1] == f"{statistics.median(series[name]['seconds']):.3g} s"
    about = " ".join(texts)
    assert all(said in about for said in ("2 cores", "2026-11-22", "make bench-peers", "2026-11-22-2-cores-peers.json"))


def test_bars_are_as_long_as_their_figures() -> None:
    space = {"svg": "http://www.w3.org/2000/svg"}
    for name, picture in pictures.drawn().items():
        bars = ET.fromstring(picture).findall("svg:rect[@height='14']", space)
        widths = [float(bar.get("width", "0")) for bar in bars]
        draw, record = pictures.PICTURES[name]
        chart = draw({**json.loads((pictures.RESULTS / record).read_text("utf-8")), "record": record})
        lengths = [length for group in chart.groups.values() for bar in group for _, length in bar.parts]
        scale = max(widths) / max(lengths)
        assert widths == pytest.approx([max(length * scale, 1) for length in lengths], abs=0.2)
