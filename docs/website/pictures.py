"""Pictures of recorded benchmarks: ``python -m docs.website.pictures`` draws docs/pictures from benchmarks/results
(``make pictures``).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.website.charts import Bar, Chart

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "pictures"
Recorded = Mapping[str, Any]

_ENDS = {
    "From a trainer's shards to Hugging Face files": (
        ("weighbridge push, durable", "push, until flushed to disk"),
        ("Megatron save, convert", "Megatron-core's save, then convert"),
    ),
    "From a trainer's shards to less than that": (
        ("weighbridge push, held", "push: the rank is blocked"),
        ("weighbridge push, ready", "push: engines can pull it"),
        ("Megatron save", "Megatron-core's save alone"),
    ),
    "From whole, renamed tensors": (
        ("safetensors save_file", "safetensors save_file"),
        ("DCP save", "torch DCP save"),
        ("DCP HF writer", "torch DCP's HF writer, consolidated"),
        ("raw grpcio", "raw grpcio: the bytes alone, kept nowhere"),
    ),
    "Back, from what is stored to tensors": (
        ("weighbridge pull", "pull of the version in memory"),
        ("safetensors load_file", "safetensors load_file"),
        ("DCP load", "torch DCP load"),
        ("runai-model-streamer", "runai-model-streamer"),
    ),
}
"""Series of a comparison with peers, by what they begin with and end in."""


def peers(recorded: Recorded) -> Chart:
    """Seconds of pushes, pulls and other tools on one task."""
    (comparison,) = recorded["comparisons"]
    groups = {
        heading: tuple(
            _bar(
                label,
                "ours" if name.startswith("weighbridge") else "theirs",
                comparison["series"][name]["seconds"],
            )
            for name, label in names
        )
        for heading, names in _ENDS.items()
    }
    rounds = len(comparison["series"]["raw grpcio"]["seconds"])
    title = f"{comparison['gigabytes']:g} GB on one machine, one rank, next to other tools"
    about = (
        f"Seconds, medians of {rounds} rounds; the lines are their range. Peers do not flush to disk. make bench-peers"
    )
    return Chart(title, (about, _where(recorded)), {"ours": "Weighbridge", "theirs": "others"}, groups)


def gpu(recorded: Recorded) -> Chart:
    """Seconds of pushes and pulls of tensors on a GPU, next to the GPU's own copies."""
    groups = {}
    for case in recorded["cases"]:
        seconds = case["seconds"]
        groups[f"Cut {case['cut']}: {case['clients']} ranks push, {case['clients']} engines pull"] = (
            _bar("the GPU's pinned copy of the shards", "limit", seconds["copy"]),
            _bar("push: ranks are blocked", "ours", seconds["held"]),
            _bar("push: engines can pull it", "ours", seconds["ready"]),
            _bar("the GPU's pinned copy of the slices", "limit", seconds["slice_copy"]),
            _bar("pull into another process's GPU memory", "ours", seconds["pull"]),
        )
    first = recorded["cases"][0]
    title = f"{first['bytes']['model'] / 1e9:.4g} GB of bf16 weights between trainers and engines on one GPU"
    about = (
        f"Seconds of the slowest client, medians of {len(first['seconds']['copy'])} rounds; the "
        "lines are their range. make bench"
    )
    return Chart(title, (about, _where(recorded)), {"ours": "Weighbridge", "limit": "what the card can"}, groups)


def vllm_updates(recorded: Recorded) -> Chart:
    """Seconds of an update of a vLLM model, by its own loader on whole tensors and by what was recorded of it."""
    lanes = {"local": "shared memory", "grpc": "gRPC"}
    cases = [case for case in recorded["cases"] if case["vllm"].endswith("weights as loaded")]
    groups = {}
    for case in cases:
        ranks = f"{case['ranks']} rank{'s' if case['ranks'] > 1 else ''}"
        groups[f"{ranks}, over {lanes[case['lane']]}"] = tuple(
            Bar(label, (("more", case["seconds"][f"{way} bytes"]), ("ours", case["seconds"][f"{way} pause"])))
            for way, label in (
                ("loader", "vLLM's loader, whole tensors"),
                ("recorded", "each rank's own slices"),
            )
        )
    title = f"Update of a vLLM model of {cases[0]['gigabytes']:g} GB"
    about = f"Seconds of the slowest rank, medians of the rounds; vLLM {cases[0]['vllm']}. make bench-vllm"
    kinds = {"more": "bytes are fetched, the model serves", "ours": "the model is paused"}
    return Chart(title, (about, _where(recorded)), kinds, groups)


PICTURES: Mapping[str, tuple[Callable[[Recorded], Chart], str]] = {
    "peers.svg": (peers, "2026-11-22-2-cores-peers.json"),
    "gpu.svg": (gpu, "2026-11-24-nvidia-h200.json"),
    "vllm-updates.svg": (vllm_updates, "2026-11-22-2-cores-vllm-updates.json"),
}
"""Files in docs/pictures: what draws each, and the recorded figures that it is drawn from."""


def drawn() -> Mapping[str, str]:
    """All pictures, by the names of their files."""
    return {
        name: draw({**json.loads((RESULTS / record).read_text("utf-8")), "record": record}).svg()
        for name, (draw, record) in PICTURES.items()
    }


def _bar(label: str, kind: str, seconds: Sequence[float]) -> Bar:
    return Bar(label, ((kind, statistics.median(seconds)),), min(seconds), max(seconds))


def _where(recorded: Recorded) -> str:
    """The machine, the date, the commit if it was recorded, and the file of the figures."""
    machine = recorded["machine"]
    card = f"{machine['gpu']}, " if "gpu" in machine else ""
    commit = f", commit {machine['commit']}" if machine.get("commit") else ""
    about = (
        f"{card}{machine['cpus']} cores ({machine['machine']}), torch {machine['torch']}, {recorded['date']}{commit}"
    )
    return f"{about}; benchmarks/results/{recorded['record']}"


def main() -> None:
    """Draw all pictures, and take away those that are not drawn any more."""
    FOLDER.mkdir(exist_ok=True)
    pictures = drawn()
    for path in FOLDER.glob("*.svg"):
        if path.name not in pictures:
            path.unlink()
    for name, picture in pictures.items():
        path = FOLDER / name
        same = path.exists() and path.read_text("utf-8") == picture
        path.write_text(picture, "utf-8")
        sys.stdout.write(f"{name} {'is as it was' if same else 'has changed'}\n")


if __name__ == "__main__":
    main()
