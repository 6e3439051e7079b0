"""The tree of a history against a plain dict: any edits, in any order, and nothing written that need not be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.heads import Nodes, text_of_node
from weighbridge.errors import DataLoss, FailedPrecondition
from weighbridge_storage.documents import entry_json
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import MAX_VERSION
from weighbridge_storage.head import history_nodes
from weighbridge_storage.head.history_nodes import FANOUT, Inner, Leaf, NodeRef
from weighbridge_storage.head.history_tree import descending, edited, find, names


def entry(number: int, *, retired_ms: int = 0, step: int = 0) -> VersionEntry:
    return VersionEntry(number, step, "r", 1, 2, 3, "f", f"w{number}", retired_ms)


class Tree(Nodes):
    """Nodes, and edits of trees of them, each for a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._generations = itertools.count(1)

    def edit(self, root: NodeRef | None, changes: dict[int, VersionEntry | None]) -> NodeRef | None:
        edit = edited(root, changes, self.load, next(self._generations))
        self.write(edit.nodes)
        assert edit.nodes.keys() <= names(edit.root, self.load), "no node is written for nothing"
        return edit.root


numbers = st.one_of(
    st.integers(1, 300),
    st.integers(1, FANOUT**3),
    st.integers(1, MAX_VERSION),
    st.sampled_from([1, FANOUT - 1, FANOUT, FANOUT**2 - 1, FANOUT**2, MAX_VERSION]),
)
changes = st.dictionaries(
    numbers,
    st.one_of(st.none(), st.builds(lambda ms, step: (ms, step), st.sampled_from([0, 0, 7]), st.integers(0, 3))),
    max_size=12,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(changes, max_size=8), st.lists(numbers, max_size=5))
def test_the_tree_says_what_a_dict_says_after_any_edits_and_so_does_every_tree_before(
    edits: list[dict[int, tuple[int, int] | None]], asked: list[int]
) -> None:
    nodes = Tree()
    root: NodeRef | None = None
    expected: dict[int, VersionEntry] = {}
    seen: list[tuple[NodeRef | None, dict[int, VersionEntry]]] = []
    for edit in edits:
        given_entries = {
            n: None if value is None else entry(n, retired_ms=value[0], step=value[1]) for n, value in edit.items()
        }
        root = nodes.edit(root, given_entries)
        expected = {n: e for n, e in {**expected, **given_entries}.items() if e is not None}
        seen.append((root, expected))
    for tree, content in seen:
        listed = list(descending(tree, nodes.load))
        assert listed == [content[n] for n in sorted(content, reverse=True)]
        for number in {*asked, *content}:
            assert find(tree, number, nodes.load) == content.get(number)
            assert [e.number for e in descending(tree, nodes.load, number)] == sorted(
                (n for n in content if n < number), reverse=True
            )
        found = [e.number for e in descending(tree, nodes.load, None, lambda ref: ref.retired > 0)]
        assert {n for n, e in content.items() if e.retired} <= set(found) <= set(content)
        if tree is None:
            assert not content
        else:
            retired = sum(e.retired for e in content.values())
            summary = (tree.last, tree.durable, tree.retired)
            assert summary == (max(content), len(content) - retired, retired)
            assert tree.level == 0 or min(content) // FANOUT**tree.level != max(content) // FANOUT**tree.level


def test_an_edit_that_changes_nothing_writes_nothing() -> None:
    nodes = Tree()
    root = nodes.edit(None, {n: entry(n) for n in range(1, 200)})
    written = len(nodes.texts)
    assert nodes.edit(root, {}) == root
    assert nodes.edit(root, {5: entry(5), 150: entry(150), 500: None, 10**9: None}) == root
    assert len(nodes.texts) == written
    assert nodes.edit(None, {7: None}) is None


def test_an_edit_writes_one_node_of_each_level_and_a_query_reads_no_more() -> None:
    nodes = Tree()
    root = nodes.edit(None, {n: entry(n) for n in range(1, 10_001)})
    assert root is not None
    assert root.level == 2
    assert len(nodes.texts) == 157 + 3 + 1
    before = len(nodes.texts)
    found, levels = nodes.loads(lambda: nodes.edit(root, {5000: entry(5000, retired_ms=9)}))
    root = found
    assert len(nodes.texts) == before + 3
    found, levels = nodes.loads(lambda: find(root, 5000, nodes.load))
    assert (found, levels) == (entry(5000, retired_ms=9), [2, 1, 0])
    newest, levels = nodes.loads(lambda: list(itertools.islice(descending(root, nodes.load), 20)))
    assert [e.number for e in newest] == list(range(10_000, 9_980, -1))
    assert levels == [2, 1, 0, 0], "10,000 is the first but 15 of its leaf"
    retired, levels = nodes.loads(
        lambda: [e for e in descending(root, nodes.load, None, lambda ref: ref.retired > 0) if e.retired]
    )
    assert (retired, levels) == ([entry(5000, retired_ms=9)], [2, 1, 0])
    reachable, levels = nodes.loads(lambda: names(root, nodes.load))
    assert (len(reachable), sorted(levels)) == (161, [1, 1, 1, 2]), "no leaf is read"


def test_a_history_of_which_only_the_newest_are_left_is_one_leaf() -> None:
    nodes = Tree()
    root = nodes.edit(None, {n: entry(n) for n in range(1, 9_991)})
    root = nodes.edit(root, dict.fromkeys(range(1, 9_985)))
    assert root is not None
    assert (root.level, root.first, root.durable) == (0, 9_984, 6)
    assert nodes.edit(root, dict.fromkeys(range(9_985, 9_991))) is None


def test_what_a_newer_release_adds_to_entries_and_nodes_stays_when_others_edit_them() -> None:
    nodes = Tree()
    newer = VersionEntry(70, 1, "r", 1, 2, 3, "f", "w", extra={"parts": ["weights", "optimizer"]})
    root = nodes.edit(None, {3: entry(3), 70: newer})
    assert root is not None
    root = signed(nodes, root)
    after = nodes.edit(root, {71: entry(71)})
    assert after is not None
    assert find(after, 70, nodes.load) == newer
    top = nodes.load(after)
    assert isinstance(top, Inner)
    assert top.extra == {"signed": 0}
    (kept, anew) = (top.children[0], top.children[64])
    assert json.loads(nodes.texts[kept.name])["signed"] == 0
    leaf = nodes.load(anew)
    assert isinstance(leaf, Leaf)
    assert leaf.extra == {"signed": 64}, "that of the leaf before"


def signed(nodes: Nodes, ref: NodeRef) -> NodeRef:
    """The tree as a newer release writes it that adds a field to each node: the first number that it covers."""
    document = {**json.loads(nodes.texts[ref.name]), "signed": ref.first}
    node = nodes.load(ref)
    if isinstance(node, Inner):
        document["children"] = [entry_json.to_json(signed(nodes, child)) for child in node.children.values()]
    text, after = text_of_node(document, ref)
    nodes.texts[after.name] = text
    return after


def stored() -> tuple[dict[str, Any], NodeRef, dict[str, Any], NodeRef]:
    """The texts of an inner node and of a leaf, and what refers to them."""
    nodes = Tree()
    root = nodes.edit(None, {n: entry(n, retired_ms=n % 2) for n in (65, 66, 130)})
    assert root is not None
    top = nodes.load(root)
    assert isinstance(top, Inner)
    leaf = top.children[64]
    return json.loads(nodes.texts[root.name]), root, json.loads(nodes.texts[leaf.name]), leaf


INNER_BREAKS: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(level=2),
    lambda d: d.update(level=0),
    lambda d: d.update(level=-1),
    lambda d: d.pop("children"),
    lambda d: d.update(children=[]),
    lambda d: d["children"].pop(),
    lambda d: d["children"].append(d["children"][0]),
    lambda d: d["children"][0].update(level=1),
    lambda d: d["children"][0].update(name="../../head"),
    lambda d: d["children"][0].update(last=FANOUT**2 + 1),
    lambda d: d["children"][0].update(last=0),
    lambda d: d["children"][0].update(durable=2),
    lambda d: d["children"][0].update(durable=65),
    lambda d: d["children"][0].update(retired=0, durable=0),
    lambda d: d["children"][0].pop("retired"),
]
LEAF_BREAKS: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(level=1),
    lambda d: d.update(entries=[]),
    lambda d: d.update(entries={}),
    lambda d: d["entries"].pop(),
    lambda d: d["entries"].append(d["entries"][0]),
    lambda d: d["entries"][0].update(number=67),
    lambda d: d["entries"][0].update(number=1),
    lambda d: d["entries"][0].update(retired_ms=0),
    lambda d: d["entries"][0].update(retired_ms=-1),
    lambda d: d["entries"][0].update(step="1"),
    lambda d: d["entries"][0].pop("write_id"),
]


@pytest.mark.parametrize("number", range(len(INNER_BREAKS) + len(LEAF_BREAKS)))
def test_a_node_that_is_not_what_refers_to_it_says_is_data_loss(number: int) -> None:
    inner, root, leaf, ref = stored()
    broken, said = (inner, root) if number < len(INNER_BREAKS) else (leaf, ref)
    history_nodes.from_json(*text_of_node(broken, said), "the node")
    [*INNER_BREAKS, *LEAF_BREAKS][number](broken)
    with pytest.raises(DataLoss, match="the node") as caught:
        history_nodes.from_json(*text_of_node(broken, said), "the node")
    assert "weighbridge fsck STORE --repair" in caught.value.fix


def test_a_node_is_what_was_written_or_is_refused_whichever_byte_of_it_is_another_one() -> None:
    nodes = Tree()
    root = nodes.edit(None, {n: entry(n, retired_ms=n % 2) for n in (65, 66, 130)})
    assert root is not None
    top = nodes.load(root)
    assert isinstance(top, Inner)
    for ref in (root, *top.children.values()):
        text = nodes.texts[ref.name]
        for place, flips in itertools.product(range(len(text)), (0x01, 0x02, 0x10, 0xFF)):
            damaged = bytearray(text)
            damaged[place] ^= flips
            with pytest.raises(DataLoss, match=r"^the node does not agree with the digest in its name\n"):
                history_nodes.from_json(bytes(damaged), ref, "the node")
        for cut in range(len(text)):
            with pytest.raises(DataLoss):
                history_nodes.from_json(text[:cut], ref, "the node")


def test_a_node_in_the_place_of_another_one_is_refused() -> None:
    nodes = Tree()
    root = nodes.edit(None, {1: entry(1)})
    other = nodes.edit(None, {1: entry(1, step=7)})
    assert root is not None
    assert other is not None
    assert (root.last, root.durable) == (other.last, other.durable)
    with pytest.raises(DataLoss, match="the digest in its name"):
        history_nodes.from_json(nodes.texts[other.name], root, "the node")


def test_a_node_of_another_format_or_with_a_feature_that_is_lacking_is_refused_by_name() -> None:
    _, _, leaf, ref = stored()
    with pytest.raises(FailedPrecondition, match="format 2"):
        history_nodes.from_json(*text_of_node({**leaf, "format": 2}, ref), "the node")
    with pytest.raises(FailedPrecondition, match="'bitmaps'"):
        history_nodes.from_json(*text_of_node({**leaf, "requires": ["bitmaps"]}, ref), "the node")
