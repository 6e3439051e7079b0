"""Is a head that contradicts itself, or is damaged, noticed?"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.heads import (
    Nodes,
    allocate,
    entry,
    head_with,
    opened,
    text_of,
    with_digest,
)
from weighbridge._core.resources import Gate, Retention
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
)
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import KEPT, REMEMBERED_WRITES, Head
from weighbridge_storage.head.head_changes import (
    delete_versions,
    keep,
    mark_history,
    register,
    set_ref,
    stamp,
)
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.open_versions import (
    claim_version,
    give_up_version,
)
from weighbridge_storage.stores.objects import ObjectStore

SMOL = ModelName("acme", "smol")


def good() -> dict[str, Any]:
    nodes = Nodes()
    head = nodes.settle(head_with(1, 2, 3), 2)
    head = mark_history(set_ref(nodes.history(head), "prod", 2), 8)
    head = delete_versions(nodes.history(head), [1], 99)
    head = opened(opened(head)[0])[0]
    head = give_up_version(claim_version(head, 4, "c"), 5, "no more", 7)
    head = keep(head, Retention(keep_last=3))
    document: dict[str, Any] = json.loads(stamp(head, head, "w1").to_json())
    del document["digest"]
    return document


BREAKS: list[Any] = [
    lambda d: d.update(format=0),
    lambda d: d.update(format="1"),
    lambda d: d.update(format=True),
    lambda d: d.update(generation=0),
    lambda d: d.update(generation=1.0),
    lambda d: d.update(generation=2**63),
    lambda d: d.update(next_version=3),
    lambda d: d.update(next_version=-1),
    lambda d: d.update(registration=[]),
    lambda d: d.update(files_id=None),
    lambda d: d.update(files_id="x" * 129),
    lambda d: d.update(files_id="../../other"),
    lambda d: d.update(requires="deltas"),
    lambda d: d.update(recent={}),
    lambda d: d["recent"].append(d["recent"][0]),
    lambda d: d["recent"].append(7),
    lambda d: d["recent"][0].update(number=3),
    lambda d: d["recent"][0].update(number=0),
    lambda d: d["recent"][0].update(number=4),
    lambda d: d["recent"][0].update(number=9),
    lambda d: d["recent"][0].update(step=-1),
    lambda d: d["recent"][0].update(step=None),
    lambda d: d["recent"][0].update(run="a\nb"),
    lambda d: d["recent"][0].update(write_id=""),
    lambda d: d["recent"][0].update(retired_ms=-1),
    lambda d: d["recent"][0].update(retired_ms=None),
    lambda d: d["recent"][0].pop("nbytes"),
    lambda d: d["recent"][0].update(verified_ms=-1),
    lambda d: d["recent"][0].update(nonfinite_elements="1"),
    lambda d: d["recent"][0].update(ranks=2**63),
    lambda d: d["recent"][1].update(retired_ms=5),
    lambda d: d.update(removed=[0]),
    lambda d: d.update(removed=["1"]),
    lambda d: d.update(removed=[3]),
    lambda d: d.update(removed=[4]),
    lambda d: d.update(removed=[9]),
    lambda d: d.update(removed=[2]),
    lambda d: d.update(root=7),
    lambda d: d.update(root=None),
    lambda d: d["root"].update(name="../../head"),
    lambda d: d["root"].update(last=9),
    lambda d: d["root"].update(level=7),
    lambda d: d["root"].pop("durable"),
    lambda d: d.update(mark={}),
    lambda d: d["mark"].update(generation=-1),
    lambda d: d["mark"].update(marked_ms="8"),
    lambda d: d["mark"].pop("root"),
    lambda d: d["mark"].update(root={}),
    lambda d: d["refs"].update(latest={"version": 1}),
    lambda d: d["refs"].pop("latest"),
    lambda d: d["refs"].update(prod={"version": 1}),
    lambda d: d["refs"].update(prod={"version": 4}),
    lambda d: d["refs"].update(prod={"version": 64}),
    lambda d: d["refs"].update({"../x": {"version": 2}}),
    lambda d: d["refs"].update(live={"version": 2}),
    lambda d: d["refs"].update(prod={"version": "2"}),
    lambda d: d["refs"].update(prod=2),
    lambda d: d["refs"].update(prod={}),
    lambda d: d["open"].append(d["open"][0]),
    lambda d: d["open"][0].update(number=3),
    lambda d: d["open"][0].update(number=6),
    lambda d: d["open"][0].update(ranks=0),
    lambda d: d["open"][0].update(until_ms="1"),
    lambda d: d["open"][0].update(claim=7),
    lambda d: d["open"][0].pop("parent"),
    lambda d: d["failed"][0].update(number=4),
    lambda d: d["failed"][0].update(reason="a\nb"),
    lambda d: d["failed"][0].update(failed_ms=-1),
    lambda d: d["failed"][0].update(state=1),
    lambda d: d["failed"][0].update(step=-1),
    lambda d: d["failed"][0].update(run=None),
    lambda d: d["retention"].update(keep_last=-1),
    lambda d: d["retention"].update(keep_last=2**60),
    lambda d: d["retention"].pop("keep_every"),
    lambda d: d.update(writes=[7]),
    lambda d: d.update(writes=[["x"]]),
    lambda d: d.update(writes=["x"] * (REMEMBERED_WRITES + 1)),
    *[lambda d, name=name: d.pop(name) for name in good()],
]


@pytest.mark.parametrize(
    ("location", "number"),
    [("s3", 0), *(("local", number) for number in range(len(BREAKS)))],
    indirect=["location"],
)
def test_a_head_that_contradicts_itself_is_data_loss(store: ObjectStore, number: int) -> None:
    document = good()
    BREAKS[number](document)
    store.put(SMOL.head_key, text_of(document), mode="create")
    with pytest.raises(DataLoss) as caught:
        HeadStore(store).read(SMOL)
    assert SMOL.head_key in caught.value.message
    assert "weighbridge fsck STORE --repair" in caught.value.fix
    assert len(str(caught.value)) < 600
    with pytest.raises(DataLoss):
        HeadStore(store).update(SMOL, allocate)
    left = store.get(SMOL.head_key)[0]
    assert left == text_of(document), "a head that cannot be read is left as it is"


def test_a_head_of_another_format_is_refused_by_its_number_and_left_as_it_is(store: ObjectStore) -> None:
    for other in (2, 4):
        text = text_of({"format": other, "versions": []})
        store.put(SMOL.head_key, text, mode="overwrite")
        for use in (HeadStore(store).read, lambda model: HeadStore(store).update(model, allocate)):
            with pytest.raises(FailedPrecondition, match=f"{SMOL.head_key} has format {other}") as caught:
                use(SMOL)
            assert caught.value.fix == f"use a Weighbridge that reads format {other}"
        assert store.get(SMOL.head_key)[0] == text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"\x00",
        b"[" * 100_000,
        b'{"format": 1',
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b'{"format": 1e400}',
        b'{"format": ' + b"1" * 10_000 + b"}",
    ],
)
def test_text_that_is_no_head_is_data_loss(text: bytes) -> None:
    with pytest.raises(DataLoss):
        Head.from_json(text)


def test_a_head_is_refused_whichever_bit_of_it_is_flipped_and_wherever_it_is_cut() -> None:
    head = Head.from_json(text_of(good()))
    text = head.to_json()
    assert Head.from_json(text) == head
    for place, bit in itertools.product(range(len(text)), range(8)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << bit
        with pytest.raises(DataLoss, match=r"^head\.json "):
            Head.from_json(bytes(damaged))
    for cut in range(len(text)):
        with pytest.raises(DataLoss):
            Head.from_json(text[:cut])


def test_a_head_ends_with_the_digest_of_what_comes_before_it() -> None:
    text = Head.from_json(text_of(good())).to_json()
    start, end = text[:-77], text[-77:]
    assert end == b',"digest":"' + blake3(start).hexdigest().encode() + b'"}'
    for other in (start + b"}", start + b',"digest":"' + b"0" * 64 + b'"}', text + b"\n", b" " + text):
        with pytest.raises(DataLoss, match="digest"):
            Head.from_json(other)


@given(st.data())
def test_any_value_in_a_head_is_refused_or_kept(data: st.DataObject) -> None:
    """A head with a right digest may come from another release or from a faulty writer."""
    text = bytearray(text_of(good())[:-77])
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        head = Head.from_json(with_digest(bytes(text) + b"}"))
    except (DataLoss, FailedPrecondition):  # it may have become another format
        return
    assert Head.from_json(head.to_json()) == head


_REST = (
    b'"generation":1,"mark":null,"next_version":1,"open":[],"recent":[],"refs":{},"registration":{},"removed":[],'
    b'"requires":[%s],"retention":{%s},"root":null,"writes":["w"]}'
)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        (
            b'{"failed":[],"files_id":"","format":3,'
            + _REST % (b"", b'"keep_every":0,"keep_every_steps":0,"keep_last":0,"keep_younger_s":0'),
            Head(generation=1, writes=("w",)),
        ),
        (
            b'{"failed":[],"files_id":"","format":3,"gate":{"allow_nonfinite":true},'
            + _REST % (b"", b'"keep_every":0,"keep_every_steps":0,"keep_last":3,"keep_younger_s":60'),
            Head(
                generation=1,
                retention=Retention(keep_last=3, keep_younger_s=60),
                gate=Gate(allow_nonfinite=True),
                writes=("w",),
            ),
        ),
        (
            b'{"failed":[],"files_id":"","format":3,"gate":{"approval_required":true,"later":[1],"protected":{"prod":{"approvals":2}}},'
            + _REST
            % (
                b'"held-versions","protected-refs","kept-steps"',
                b'"keep_every":0,"keep_every_steps":50,"keep_last":0,"keep_younger_s":0,"later":{"x":1}',
            ),
            None,
        ),
    ],
    ids=["nothing said", "said", "with members of a later release"],
)
def test_what_a_head_keeps_is_read_and_written_to_the_byte(text: bytes, head: Head | None) -> None:
    found = Head.from_json(with_digest(text))
    assert found.to_json() == with_digest(text)
    assert head in (None, found)
    assert {ref: entry.approvals for ref, entry in found.protected.items()} == ({"prod": 2} if b"prod" in text else {})


@pytest.mark.parametrize("kind", KEPT, ids=lambda each: each.__name__)
def test_a_value_that_a_head_keeps_is_read_back_until_another_takes_its_place(kind: type[Any]) -> None:
    samples = {"int": 7, "bool": True, "str": "é", "tuple[str, ...]": ("a", "b")}
    value = kind(**{each.name: samples[str(each.type)] for each in dataclasses.fields(kind)})
    named = [each for each in dataclasses.fields(Head) if type(each.default) is kind]
    assert [each.name for each in named] == [KEPT[kind].name], "a type stands for one value"
    head = stamp(keep(Head(extra={"later": 1}), value), Head(), "w")
    read = Head.from_json(head.to_json())
    assert (read, read.kept(kind)) == (head, value)
    assert json.loads(read.to_json())[named[0].name] == json.loads(json.dumps(dataclasses.asdict(value)))
    assert keep(read, kind()).to_json() == stamp(Head(extra={"later": 1}), Head(), "w").to_json()


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": b"1"}, {"x": {1, 2}}])
def test_what_json_does_not_have_cannot_be_registered(store: ObjectStore, value: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        HeadStore(store).update(SMOL, lambda head: (register(head, "f", value), None), create=True)
    assert HeadStore(store).read(SMOL) is None


def test_an_entry_holds_only_what_can_be_read_back() -> None:
    bad: list[dict[str, Any]] = [
        {"number": 0},
        {"step": -1},
        {"nbytes": 2**63},
        {"run": "\x00"},
        {"write_id": ""},
    ]
    for fields in bad:
        with pytest.raises(InvalidArgument):
            dataclasses.replace(entry(1), **fields)
