"""The worked example of docs/formats.md against the code that reads and writes stores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from blake3 import blake3

from weighbridge_service.models.listed_tensors import ListedTensors
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head import history_nodes
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"
SMOL = ModelName("acme", "smol")


@pytest.fixture
def example() -> dict[str, str]:
    """The documents of the example, by their place below the model's."""
    text = DOCUMENT.read_text().partition("### Example")[2]
    found = re.findall(r"`((?:history/[^`]+|head)\.json)`:\n\n```json\n(.*?)\n```", text, re.DOTALL)
    assert [place.partition("/")[0] for place, _ in found] == ["head.json", "history", "history", "history"]
    return dict(found)


def test_the_example_of_the_document_is_read_as_the_document_says(example: dict[str, str], tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for place, text in example.items():
        store.put(SMOL.prefix + place, text.encode(), mode="create")
    found = HeadStore(store).history(SMOL)
    assert found is not None
    assert list(found.versions()) == [64, 65]
    assert {number: entry.retired_ms for number, entry in found.retired().items()} == {63: 1767229700000}
    assert [number for number in range(1, 70) if found.is_gone(number)] == [*range(1, 63), 66]
    assert (found.head.latest, found.head.ref_numbers["prod"]) == (65, 64)
    assert {number: entry.nonfinite_elements for number, entry in found.versions().items()} == {64: 0, 65: 3}
    assert {number: entry.aborted for number, entry in found.head.failed.items()} == {66: True}


def test_the_example_of_the_document_is_what_this_release_writes(example: dict[str, str]) -> None:
    head = Head.from_json(example["head.json"].encode())
    written, printed = (json.loads(text) for text in (head.to_json(), example["head.json"]))
    assert written.pop("digest") != printed.pop("digest"), "the bytes are others"
    assert written == printed
    assert head.root is not None
    nodes = [head.root]
    for ref in nodes:
        text = example[f"history/{ref.name}.json"]
        node = history_nodes.from_json(text.encode(), ref, ref.name)
        assert json.loads(history_nodes.to_json(node)) == json.loads(text)
        nodes += node.children.values() if isinstance(node, history_nodes.Inner) else []
    assert len(nodes) == 3


def test_the_list_of_tensors_of_the_document_is_read_and_written_as_it_stands_there() -> None:
    found = re.search(r"```json\n(.*)\n```", DOCUMENT.read_text().partition("## List of tensors")[2])
    assert found is not None
    listed = ListedTensors.decode(found[1].encode(), "the example")
    assert [(spec.name, spec.dtype.short, spec.shape) for spec in listed.specs] == [
        ("layers.2.weight", "fp32", (4, 4)),
        ("layers.10.weight", "fp32", (4, 4)),
        ("scale", "bf16", ()),
    ]
    assert ListedTensors.of(reversed(listed.specs)).encoded == found[1].encode()
    assert listed.digest == blake3(found[1].encode()).hexdigest()
