"""Registrations of what is no model: are they refused at once, with nothing of them run or fetched?"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.bad_input.bench import GOOD, Bench, _numbers, config, resident_bytes
from tests.support.raw_clients import assert_equal
from tests.support.waiting import processor_seconds
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound


@pytest.mark.parametrize("model_type", ["gpt2", "evil", "../../evil", "", None, 5, ["qwen3"], {"a": 1}, "x" * 10_000])
def test_a_model_type_without_a_map_is_refused_with_the_list_of_those_that_have_one(
    bench: Bench, model_type: Any
) -> None:
    with pytest.raises(InvalidArgument, match="no weight map") as caught:
        bench.trainer.register_files("acme/other", {"config.json": config(bench, model_type=model_type)})
    for family in ("llama", "qwen2", "qwen3"):
        assert family in caught.value.details[0]


BAD_CONFIGS: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe\x00{",
    "large": b'{"model_type":"qwen3"' + b" " * (2 << 20) + b"}",
    "deep": b'{"model_type":"qwen3","a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "deep objects": b'{"model_type":"qwen3","a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "long number": b'{"model_type":"qwen3","hidden_size":' + b"9" * 1_000_000 + b"}",
    **{
        f"{name} = {value}": {name: value}
        for name in (
            "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size", "head_dim",
        )
        for value in (10**9, 10**18, 10**30, 1e308, -1, 0, "7", [1], {"a": 1}, 1.5, True)
    },
    "heads do not divide": {"num_attention_heads": 7},
    "key-value heads do not divide": {"num_key_value_heads": 3},
    "rope": {name: {"rope_type": "evil"} for name in ("rope_scaling", "rope_parameters")},  # transformers 4 has the one, 5 the other
    "activation": {"hidden_act": "__import__('os').system('true')"},
    "dtype": {"torch_dtype": "os", "dtype": "os"},
    "no layers": {"num_hidden_layers": None},
    "attention of no kind": {"layer_types": ["evil", "evil"]},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_config_that_is_no_model_is_refused_at_once(bench: Bench, what: str) -> None:
    bad = BAD_CONFIGS[what]
    content = bad if isinstance(bad, bytes) else config(bench, **bad)

    def refuse() -> None:
        with pytest.raises(InvalidArgument) as caught:
            bench.trainer.register_files("acme/bomb", {"config.json": content})
        assert len(str(caught.value)) < 2000

    before = resident_bytes()
    assert processor_seconds(refuse) < 5.0
    assert resident_bytes() - before < 500 << 20
    with pytest.raises(NotFound):
        bench.trainer.model("acme/bomb")


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil--code.Class")},
        {"auto_map": 5},
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"num_labels": 10**9},
        {"to_dict": 1, "__class__": "evil", "kwargs": {}, "self": 1},
        {"quantization_config": {"quant_method": "evil"}},
    ],
)
def test_fields_that_name_code_or_fill_memory_are_not_looked_at(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    reached: list[str] = []
    for module in ("transformers.dynamic_module_utils", "transformers.integrations.hub_kernels"):
        __import__(module)
        for name in ("get_class_from_dynamic_module", "get_cached_module_file", "load_and_register_kernel"):
            if hasattr(sys.modules[module], name):
                monkeypatch.setattr(sys.modules[module], name, lambda *a, n=name, **k: reached.append(n))
    monkeypatch.setattr(
        "transformers.modeling_utils.load_and_register_kernel",
        lambda *a: reached.append("kernel"),
        raising=False,  # transformers 5 has it not
    )
    connect = socket.create_connection

    def create_connection(address: tuple[str, int], *arguments: Any, **named: Any) -> socket.socket:
        if address[0] != "127.0.0.1":  # on loopback, what other tests have left may look for each other
            reached.append("network")
        return connect(address, *arguments, **named)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    name = ""

    def register() -> None:
        nonlocal name
        name = f"acme/code-{next(_numbers)}"  # one that is registered would be answered from what is there
        bench.trainer.register_files(name, {"config.json": config(bench, **fields)})

    assert processor_seconds(register) < 5.0
    registered = bench.trainer.model(name)
    assert registered.tensor_count == len(bench.source.arrays)
    assert reached == []
    bench.trainer.push_folder(name, bench.source.folder).wait()
    assert_equal(bench.engine, name, "latest", bench.source.arrays)


def test_a_registered_model_cannot_become_another_one(bench: Bench) -> None:
    with pytest.raises(FailedPrecondition, match="registered already"):
        bench.trainer.register_files(GOOD, {"config.json": config(bench, hidden_size=64)})
    with pytest.raises(FailedPrecondition, match="registered already"):
        bench.trainer.register_files(GOOD, bench.source.files, "bf16")


def test_a_registration_without_config_or_with_an_unknown_dtype_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        bench.trainer.register_files("acme/none", {"tokenizer.json": b"{}"})
    for dtype in ("evil", "os", "float128", "x" * 10_000):
        with pytest.raises(InvalidArgument, match="not a known dtype"):
            bench.trainer.register_files("acme/none", bench.source.files, dtype)
