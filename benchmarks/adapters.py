"""``python -m benchmarks.adapters``: what an adapter costs next to a thousand others on the same base.

One service has two bases with the same weights: one adapter is on the first, and many are on the second, with some
versions each. At the end the same is done on both in turn: a push, a look at a version, a list of versions, the base's
own entry, and a dry collection. The ratio of the two is what the other adapters cost; it may be 1.3 times. Also told
are the bytes of both heads, the service's memory, and what a version of an adapter of a model of a billion parameters
takes until it is ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import processes, report
from benchmarks.history import MOST_TIMES, Service, Window, serving
from benchmarks.vital_signs import vital_signs
from tests.support.raw_clients import tiny_folder
from weighbridge import PushHandle, TrainerClient, VersionState

ONE, MANY = "bench/one", "bench/many"
LLAMA_1B = {
    "q_proj": (2048, 2048),
    "k_proj": (2048, 512),
    "v_proj": (2048, 512),
    "o_proj": (2048, 2048),
    "gate_proj": (2048, 8192),
    "up_proj": (2048, 8192),
    "down_proj": (8192, 2048),
}
"""Input and output features of the linear layers of Llama-3.2-1B, of which there are 16."""
_LAYERS = 16
_WAIT_SECONDS = 300.0


def block_of(module: str) -> str:
    """The part of a layer that a linear layer is in."""
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], layers: int, rank: int) -> int:
    """Write an adapter of random bf16 bits as peft does; returns its bytes."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random, tensors = np.random.default_rng(0), {}
    for layer in range(layers):
        for module, (taken, given) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{block_of(module)}.{module}"
            tensors[f"{name}.lora_A.weight"] = random.random((rank, taken), np.float32).astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = random.random((given, rank), np.float32).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


class Adapters:
    """A service with two bases and their adapters.

    Args:
        service: the service.
        client: client of the service.
        adapter: folder of an adapter.
    """

    def __init__(self, service: Service, client: TrainerClient, adapter: Path) -> None:
        self.service = service
        self.client = client
        self._adapter = adapter

    def push(self, base: str, name: str, step: int) -> None:
        """Push a version of an adapter until it is durable."""
        handle = self.client.import_adapter(name, self._adapter, base=f"{base}@1", step=step)
        handle.wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)

    def fill(self, base: str, names: Sequence[str], versions: int) -> None:
        """Push so many versions of each."""
        with ThreadPoolExecutor(4) as threads:
            for step in range(versions):
                begun = time.monotonic()
                for _ in threads.map(partial(self.push, base, step=step), names):
                    pass
                took = time.monotonic() - begun
                print(
                    f"{base}: version {step + 1} of {versions} of {len(names)} in {took:.0f} s",
                    file=sys.stderr,
                )

    def measure(self, base: str, name: str, step: int, window: Window) -> None:
        """Everything that is compared, once."""
        before = self.service.counts()
        window.time("push", lambda: self.push(base, name, step))
        window.note_counts(self.service.counts().minus(before))
        window.time("resolve", lambda: self.client.version(name, "latest"))
        window.time("list versions", lambda: self.client.versions(name, limit=20))
        window.time("base", lambda: self.client.model(base))
        before = self.service.counts()
        window.time("dry collection of base", lambda: self.client.collect(base, dry_run=True))
        window.note("requests of a collection", self.service.counts().minus(before).requests)


@dataclass
class Pushes:
    """Pushes of one adapter, by their seconds from the call.

    Attributes:
        held: until the call returned.
        ready: until the version was ready.
    """

    held: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)

    def push(self, push: Callable[[], PushHandle]) -> None:
        """Push a version, and wait until it is durable."""
        begun = time.perf_counter()
        handle = push()
        self.held.append(time.perf_counter() - begun)
        handle.wait(VersionState.READY, timeout=_WAIT_SECONDS)
        self.ready.append(time.perf_counter() - begun)
        handle.wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)

    @property
    def text(self) -> str:
        """Medians from the second push on, and the first one."""
        held, ready = (1e3 * statistics.median(each[1:]) for each in (self.held, self.ready))
        return f"returned after {held:.0f} ms, ready after {ready:.0f} ms (the first one {1e3 * self.ready[0]:.0f} ms)"


def trained_llama() -> Any:
    """A peft model of Llama-3.2-1B's shapes with a rank-16 adapter on its linear layers; the base has no data."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=_LAYERS,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
    lora = LoraConfig(r=16, target_modules=list(LLAMA_1B), task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    for name, parameter in list(model.named_parameters()):
        if "lora_" in name:
            data = torch.rand(parameter.shape, dtype=torch.float16)
            model.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(data)
    return model


def one_billion(client: TrainerClient, folder: Path, rounds: int) -> tuple[int, dict[str, Pushes]]:
    """Bytes of a rank-16 adapter on the linear layers of Llama-3.2-1B, and its pushes from a folder and from a model in
    training.
    """
    model = folder / "llama-1b"
    tiny_folder(model, hidden_size=8)
    config = json.loads((model / "config.json").read_text())
    names = {
        f"model.layers.{layer}.{block_of(module)}.{module}.weight": shape
        for layer in range(_LAYERS)
        for module, shape in LLAMA_1B.items()
    }
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for each in model.glob("*.safetensors*"):
        each.unlink()
    save_file(
        {name: np.zeros((given, taken), np.float16) for name, (taken, given) in names.items()},
        model / "model.safetensors",
    )
    client.import_folder("bench/llama", model, weight_map=False).wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)
    nbytes = write_adapter(folder / "rank-16", LLAMA_1B, _LAYERS, 16)
    trained, base = trained_llama(), "bench/llama@1"
    found = {"import_adapter": Pushes(), "push_adapter": Pushes()}
    for step in range(rounds):
        found["import_adapter"].push(
            lambda: client.import_adapter("bench/lora", folder / "rank-16", base=base, step=step)  # noqa: B023
        )
        found["push_adapter"].push(
            lambda: client.push_adapter("bench/trained", trained, base=base, step=step)  # noqa: B023
        )
    return nbytes, found


def verdicts(one: Window, many: Window) -> dict[str, float]:
    """Ratios by name: each measurement among many adapters, over the same with one adapter."""
    return {name: many.typical(name) / max(one.typical(name), 1e-9) for name in one.samples}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 if something takes more times as long as it may."""
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000, help="adapters on one base (default 1000)")
    parser.add_argument("--versions", type=int, default=20, help="versions of each (default 20)")
    parser.add_argument("--rounds", type=int, default=15, help="measured on both bases in turn (default 15)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    one, many = Window(0, 1), Window(args.adapters - 1, args.adapters)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch, ExitStack() as stack:  # no disk is measured
        folder = Path(scratch)
        tiny_folder(folder / "hf", hidden_size=8)
        write_adapter(folder / "adapter", {"q_proj": (8, 32)}, 1, 2)
        service = stack.enter_context(serving(str(folder / "store"), folder / "scratch"))
        client = stack.enter_context(TrainerClient(service.address))
        adapters = Adapters(service, client, folder / "adapter")
        for base in (ONE, MANY):
            client.import_folder(base, folder / "hf").wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)
        names = [f"many/a{number:05d}" for number in range(args.adapters)]
        adapters.fill(ONE, ["one/a"], args.versions)
        before = vital_signs(service.pid)
        begun = time.monotonic()
        adapters.fill(MANY, names, args.versions)
        filling = time.monotonic() - begun
        after = vital_signs(service.pid)
        for done in range(args.rounds):
            turn = [(ONE, "one/a", one), (MANY, names[done % len(names)], many)]
            for base, name, window in turn[:: 1 if done % 2 else -1]:
                adapters.measure(base, name, args.versions + done, window)
        heads = {base: (folder / "store" / "models" / base / "head.json").stat().st_size for base in (ONE, MANY)}
        nbytes, pushes = one_billion(client, folder, args.rounds)
    found = verdicts(one, many)
    rows = [
        [name, report.seconds(one.typical(name)), report.seconds(many.typical(name)), f"{ratio:.2f}"]
        if "bytes" not in name and "requests" not in name
        else [name, f"{one.typical(name):.0f}", f"{many.typical(name):.0f}", f"{ratio:.2f}"]
        for name, ratio in found.items()
    ]
    count = args.adapters * args.versions
    print(report.table(["", "1 adapter", f"{args.adapters} adapters", "times"], rows))
    print(
        f"{count} versions in {filling:.0f} s; head of the base: {heads[ONE]} and "
        f"{heads[MANY]} bytes; the service grew by "
        f"{(after.resident - before.resident) / 1e6:.0f} MB, from {before.threads} to "
        f"{after.threads} threads, from {before.descriptors} to {after.descriptors} descriptors"
    )
    print(f"rank 16 on Llama-3.2-1B, {nbytes / 1e6:.1f} MB by the local lane, medians from the second push on:")
    for name, each in pushes.items():
        print(f"  {name} {each.text}")
    if args.json is not None:
        report.write_json(
            args.json,
            one=one.samples,
            many=many.samples,
            heads=heads,
            filling=filling,
            pushes={name: vars(each) for name, each in pushes.items()},
        )
    sys.exit(any(ratio > MOST_TIMES for name, ratio in found.items() if "bytes" not in name))


if __name__ == "__main__":
    main()
