"""Are versions compared by what is kept with them and by their digests, and is metadata of any kind shown in bounded
room?
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import httpx2 as httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.service.api.http.pages.conftest import Place, place_of
from weighbridge import TrainerClient
from weighbridge._core.metadata import MAX_KEYS, Metadata
from weighbridge._core.resources import Version, VersionState
from weighbridge_service.api.http.pages.side_by_side.compare_view import LAYERS, NAMES, SideOfPage, compare_view
from weighbridge_service.api.http.pages.side_by_side.contents import Contents, FileFacts, TensorFacts
from weighbridge_service.api.http.pages.side_by_side.metadata_columns import MOST_COLUMNS, metadata_columns
from weighbridge_service.api.http.pages.side_by_side.metadata_plots import HEIGHT, WIDTH, metadata_plots

MODEL = "acme/smol"


def version(number: int, metadata: Metadata, step: int | None = None) -> Version:
    at = 10 * number if step is None else step
    return Version(MODEL, number, VersionState.DURABLE, step=at, metadata=metadata)


def test_columns_are_the_keys_that_most_versions_have_numbers_first() -> None:
    found = metadata_columns(
        [
            version(3, {"reward": 0.1 + 0.2, "by": "ann", "once": "x", "ok": True}),
            version(2, {"reward": 7, "by": "bob", "kl": 1e-9, "weighbridge.other_writer": "1"}),
            version(1, {}),
        ]
    )
    assert [key.text for key in found.keys] == ["reward", "kl", "by", "ok"]
    assert [cell.text for cell in found.cells[3]] == ["0.3", "", "ann", "true"]
    assert found.cells[3][0].title == "0.30000000000000004", "all digits are where there is room"
    assert [cell.text for cell in found.cells[2]] == ["7", "1e-09", "bob", ""]
    assert [cell.text for cell in found.cells[1]] == [""] * 4
    assert found.left_out == 1


def test_whatever_trainers_write_takes_a_few_short_cells() -> None:
    wild = [version(n, {f"{'k' * 60}{n % 3}{each}": "v" * 100 for each in range(MAX_KEYS)}) for n in range(1, 51)]
    found = metadata_columns(wild)
    assert (len(found.keys), found.left_out) == (MOST_COLUMNS, 3 * MAX_KEYS - MOST_COLUMNS)
    cells = [*found.keys, *itertools.chain.from_iterable(found.cells.values())]
    assert max(len(cell.text) for cell in cells) <= 24
    assert max(len(cell.title) for cell in cells) <= 200


def test_numbers_are_drawn_over_steps() -> None:
    (plot,) = metadata_plots([version(n, {"reward": n / 10, "by": "ann", "ok": True}) for n in (3, 2, 1)])
    assert (plot.key.text, plot.axis, plot.first, plot.last) == ("reward", "step", 10, 30)
    assert [point.text for point in plot.points] == ["step 10: 0.1", "step 20: 0.2", "step 30: 0.3"]
    xs, ys = ([getattr(point, axis) for point in plot.points] for axis in "xy")
    assert xs == sorted(xs)
    assert ys == sorted(ys, reverse=True), "greater values are further up"
    assert xs[1] - xs[0] == xs[2] - xs[1]


def test_versions_of_one_step_are_drawn_by_number() -> None:
    (plot,) = metadata_plots([version(n, {"reward": n}, step=0) for n in (1, 2)])
    assert (plot.axis, plot.first, plot.last) == ("version", 1, 2)
    assert metadata_plots([version(1, {"reward": 1.0}), version(2, {})]) == (), "one value is no line"


@pytest.mark.parametrize(
    "values",
    [
        (1.7e308, -1.7e308, 0.0),
        (5e-324, 0.0, 5e-324),
        (2**63 - 1, -(2**63), 0),
        (1.0, 1.0, 1.0),
        (1e308, 1e308 * (1 - 1e-15), 0.5),
    ],
)
def test_no_number_is_drawn_outside_of_its_picture(values: tuple[float, ...]) -> None:
    steps = (0, 2**53 - 1, 7)
    (plot,) = metadata_plots(
        [version(n, {"x": x}, step) for n, (x, step) in enumerate(zip(values, steps, strict=True), 1)]
    )
    for point in plot.points:
        assert 0 <= point.x <= WIDTH
        assert 0 <= point.y <= HEIGHT


def tensors(**digests: str) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(name, "BF16", (2, 2), 8, "model.safetensors", digest) for name, digest in digests.items())


def side(number: int, found: tuple[TensorFacts, ...], **metadata: float | str) -> SideOfPage:
    return SideOfPage(version(number, metadata), Contents((FileFacts("model.safetensors", 100),), found), ())


def test_tensors_are_compared_by_their_digests() -> None:
    before = side(
        1,
        tensors(**{"layers.0.a": "1", "layers.0.b": "2", "layers.10.a": "3", "gone": "4", "new.a": ""}),
        reward=0.5,
    )
    other = TensorFacts("layers.10.b", "F32", (2, 2), 16, "model.safetensors", "9")
    after = side(
        2,
        (
            *tensors(**{"layers.0.a": "1", "layers.0.b": "x", "layers.10.a": "y", "more": "5", "new.a": "6"}),
            other,
        ),
        reward=0.75,
    )
    before = SideOfPage(
        before.version,
        Contents(before.contents.files, (*before.contents.tensors, *tensors(**{"layers.10.b": "9"}))),
        (),
    )
    found = compare_view(before, after)
    assert (found.equal, found.changed, found.unknown, found.changed_bytes) == (1, 2, 1, "16 B")
    assert [(row.layer, row.changed, row.tensors) for row in found.layers] == [
        ("layers.0", 1, 2),
        ("layers.10", 1, 1),
    ]
    assert {each.kind: each.names for each in found.others} == {
        "only in the first": ("gone",),
        "only in the second": ("more",),
        "different dtype or shape": ("layers.10.b",),
    }
    (reward,) = found.metadata
    assert (reward.before.text, reward.after.text, reward.change) == ("0.5", "0.75", "+0.25")
    assert found.known
    assert not compare_view(before, SideOfPage(after.version, Contents(), ())).known


def test_a_comparison_of_many_tensors_names_the_first_of_them() -> None:
    old = tensors(**{f"layers.{n}.w": "1" for n in range(3 * LAYERS)}, **{f"old.{n}": "1" for n in range(3 * NAMES)})
    new = tensors(**{f"layers.{n}.w": "2" for n in range(3 * LAYERS)})
    found = compare_view(side(1, old), side(2, new))
    assert (len(found.layers), found.more_layers) == (LAYERS, 2 * LAYERS)
    assert (found.others[0].names[:2], found.others[0].more) == (("old.0", "old.1"), 2 * NAMES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service with two versions, of which one tensor differs, and the metadata of a run."""
    folder = tmp_path_factory.mktemp("compared")
    with place_of(folder) as found, TrainerClient(found.running.address) as trainer:
        trainer.register_files(MODEL, found.source.files)
        trainer.push_folder(MODEL, found.source.folder, step=10, metadata={"reward": 0.25, "by": "<ann>"}).wait(
            timeout=60
        )
        _change(found.source.folder, "model.norm.weight")
        trainer.push_folder(MODEL, found.source.folder, step=20, metadata={"reward": 0.75}).wait(timeout=60)
        trainer.set_ref(MODEL, "prod", 1)
        yield found


def _change(folder: Path, name: str) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    weights[name] = np.negative(weights[name])
    save_file(weights, path)


def test_the_page_of_a_model_shows_metadata_as_columns_and_over_steps(place: Place) -> None:
    page = httpx.get(f"{place.url}/models/{MODEL}").text
    assert '<th scope="col" class="meta">reward</th><th scope="col" class="meta">by</th>' in page
    assert "&lt;ann&gt;" in page
    begin = page.index('<svg class="plot"')
    drawn = ET.fromstring(page[begin : page.index("</svg>", begin) + len("</svg>")])  # our own
    assert [each.findtext("title") for each in drawn.iter("circle")] == ["step 10: 0.25", "step 20: 0.75"]
    assert " style=" not in page, "the policy allows none"


def test_two_versions_are_compared_by_number_or_ref(place: Place) -> None:
    page = httpx.get(f"{place.url}/models/{MODEL}/compare", params={"before": "prod", "after": "latest"})
    assert page.status_code == 200, page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert '<th scope="row">model.norm</th><td class="num" data-label="changed">1</td>' in page.text
    assert '<td class="num">+0.5</td>' in page.text
    assert f"weighbridge diff {MODEL} 1 2" in page.text


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"before": "1", "after": "77"}, 404),
        ({"before": "1"}, 400),
        ({"before": "1", "after": "x" * 400}, 400),
        ({"before": "../x", "after": "1"}, 404),
    ],
)
def test_what_cannot_be_compared_is_refused_on_a_page(place: Place, asked: dict[str, str], status: int) -> None:
    page = httpx.get(f"{place.url}/models/{MODEL}/compare", params=asked)
    assert page.status_code == status
    assert page.headers["content-type"].startswith("text/html")
