"""Is the SDK's public surface complete in itself, and free of the wire's types?"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch

import weighbridge
from weighbridge import errors

PUBLIC = {name: getattr(weighbridge, name) for name in weighbridge.__all__}


def test_every_name_is_there_once_and_in_order() -> None:
    assert list(weighbridge.__all__) == sorted(
        set(weighbridge.__all__), key=lambda name: (not name.isupper(), name)
    )  # constants first, as the linter has them
    assert set(weighbridge.__all__) == set(weighbridge._MODULE_OF)


def test_every_error_is_public() -> None:
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert defined <= set(weighbridge.__all__)


def test_every_public_class_has_a_representation_of_its_own() -> None:
    """Protocols are for others to implement."""
    bare = [
        name
        for name, kind in PUBLIC.items()
        if inspect.isclass(kind) and kind.__repr__ is object.__repr__ and not getattr(kind, "_is_protocol", False)
    ]
    assert bare == []


def test_what_a_client_is_shown_as_has_its_address_and_no_secret() -> None:
    credentials = weighbridge.Credentials(token="s3cret")
    for kind in (weighbridge.Client, weighbridge.TrainerClient, weighbridge.EngineClient):
        with kind("node7:50051", credentials=credentials) as client:
            assert repr(client) == f"<{kind.__name__} of node7:50051>"
        assert repr(client) == f"<{kind.__name__} of node7:50051, closed>"
    assert repr(weighbridge.AsyncEngineClient("node7:50051", credentials=credentials)) == (
        "<AsyncEngineClient of node7:50051>"
    )
    assert "s3cret" not in repr(credentials)


@pytest.mark.process
def test_the_import_alone_brings_no_library() -> None:
    code = "import sys, weighbridge; print([m for m in ('grpc', 'torch', 'numpy', 'google') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def _functions(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and name != "__init__":
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) or inspect.ismethod(function):
            yield f"{kind.__name__}.{name}", inspect.unwrap(function)


def _mentioned(hint: Any) -> Iterator[type]:
    """The classes in an annotation."""
    if isinstance(hint, list | tuple):
        for each in hint:
            yield from _mentioned(each)
    elif typing.get_args(hint):
        yield from _mentioned(typing.get_args(hint))
        yield from _mentioned(typing.get_origin(hint))
    elif inspect.isclass(hint):
        yield hint


# what is handed through by those who use the surface, and made within
WITHIN = {"Connection", "PullPlan", "Carrier", "Transport", "ByteCopy", "MappedMemory", "WrittenCounts"}


@pytest.mark.parametrize("kind", [each for each in PUBLIC.values() if inspect.isclass(each)])
def test_public_methods_take_and_give_public_types_and_none_of_the_wire(kind: type) -> None:
    checked = 0
    for where, function in _functions(kind):
        if "__init__" in where and kind.__name__ in {"Pull", "PushHandle", "AsyncPull", "EngineReporter"}:
            continue  # made by clients, not by their users
        names = {**vars(importlib.import_module(function.__module__)), "torch": torch}
        for hint in typing.get_type_hints(function, names).values():
            for found in _mentioned(hint):
                module = found.__module__
                assert not module.startswith(("weighbridge.v1", "google.")), f"{where} has {found}"
                assert not issubclass(found, grpc.Channel), where
                if module.startswith("weighbridge") and found.__name__ not in WITHIN:
                    assert found.__name__ in weighbridge.__all__, f"{where} has {found}, which is not public"
        checked += 1
    assert checked or not list(_functions(kind))
