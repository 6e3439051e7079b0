"""``python -m benchmarks.planning``: how long it takes to plan the largest models there are, from their configs alone.

No weights, one core. For each model: the trainer's ranks are laid out by Megatron-core's conventions, the push of all
of them is planned and proved, and then what every rank of an engine pulls. Each model is planned in a process of its
own, so that the peak of memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3-671b": {
        # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
        "config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
            "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        },
        # 61 layers over 16 stages: embedding and the layer for prediction make the first and the last one shorter
        "world": 1024, "trainer": {"tp": 8, "pp": 16, "ep": 64}, "first": 3, "last": 2,
        "engine": {"tp": 8, "ep": 32}, "goal": 2.0,
    },
    "kimi-k2-1t": {
        # https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json
        "config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": "bfloat16",
            "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 163840,
            "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        },
        "world": 256, "trainer": {"tp": 8, "pp": 8, "ep": 32}, "first": 7, "last": 6,
        "engine": {"tp": 8, "ep": 32}, "goal": 3.0,
    },
}  # fmt: skip

T = TypeVar("T")


def plan(name: str) -> dict[str, Any]:
    """Plan one model in this process; returns the figures."""
    from weighbridge._core import dtypes
    from weighbridge._core.slices import ExpertParallel, TensorParallel
    from weighbridge._formats.safetensors_files import lay_out_files
    from weighbridge_service.models.bridges import bridge_for
    from weighbridge_service.models.engine_layouts import EngineLayouts
    from weighbridge_service.models.megatron_layouts import Stages, all_ranks
    from weighbridge_service.models.model_tensors import ModelTensors
    from weighbridge_service.models.weight_maps import derive_weight_map
    from weighbridge_service.plan.planning import make_plan
    from weighbridge_service.plan.push_plan import prepare_push
    from weighbridge_service.plan.relations import identity_links
    from weighbridge_service.plan.transfers import Transfer
    from weighbridge_service.runtime.process_memory import collect_rarely

    collect_rarely()  # as the service does
    case = MODELS[name]
    seconds: dict[str, float] = {}

    def timed(what: str, work: Callable[[], T]) -> T:
        started = time.process_time()
        found = work()
        seconds[what] = round(time.process_time() - started, 3)
        return found

    # the imports of torch, transformers and mbridge are not what is measured
    bridge_for(json.dumps({**case["config"], "num_hidden_layers": 4, "n_routed_experts": 8}).encode())
    bridge = timed("describing the model", lambda: bridge_for(json.dumps(case["config"]).encode()))
    tensors = ModelTensors(dtypes.parse("bf16")).specs(bridge)
    files = timed("laying out the files", lambda: lay_out_files(list(tensors.values())))
    stages = Stages.spread(bridge.num_layers, case["trainer"]["pp"], first=case["first"], last=case["last"])
    layouts = timed(
        "laying out the trainer's ranks",
        lambda: all_ranks(bridge, tensors, case["world"], stages=stages, **case["trainer"]),
    )
    push = timed(
        "planning the push",
        lambda: prepare_push(
            list(layouts.values()), files, lambda declared: derive_weight_map(bridge, tensors, declared)
        ),
    )
    tp, ep = case["engine"]["tp"], case["engine"]["ep"]
    engines = EngineLayouts(tensors, lambda: bridge)
    pulled: list[int] = []
    copies = 0

    def pull(rank: int) -> None:
        nonlocal copies
        experts = ExpertParallel(ep, rank)
        layout = engines.layout(TensorParallel(tp, rank % tp, experts=experts))
        transfer = Transfer(make_plan(files.layout, layout, identity_links(layout.tensors.values())), scatter=False)
        copies += transfer.parts
        pulled.append(layout.nbytes)

    def pull_all() -> None:
        for rank in range(ep):
            pull(rank)

    timed(f"planning the pulls of {ep} engine ranks", pull_all)
    pushed = [stream.nbytes for stream in push.streams.values()]
    return {
        "model": name,
        "bytes": files.layout.nbytes,
        "tensors": len(tensors),
        "trainer_ranks": len(layouts),
        "shards": sum(len(layout.placements) for layout in layouts.values()),
        "push_copies": push.transfer.parts,
        "pull_copies": copies,
        "push_bytes_per_rank": {"min": min(pushed), "median": statistics.median(pushed), "max": max(pushed)},
        "push_bytes": sum(pushed),
        "pull_bytes_per_rank": {"min": min(pulled), "median": statistics.median(pulled), "max": max(pulled)},
        "seconds": seconds,
        "planning_seconds": round(sum(s for what, s in seconds.items() if what.startswith("planning")), 3),
        "goal_seconds": case["goal"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Plan every model and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(plan(arguments.one)))
        return
    found = []
    for name in MODELS:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning", "--one", name]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(answer.stdout.splitlines()[-1]))
        if not arguments.json:
            report(found[-1])
    if arguments.json:
        print(json.dumps(found, indent=2))


def report(found: dict[str, Any]) -> None:
    """Print one model's figures for people."""
    print(f"{found['model']}: {found['bytes'] / 1e12:.2f} TB in {found['tensors']} tensors")
    print(f"  {found['trainer_ranks']} trainer ranks with {found['shards']} shards")
    for what, seconds in found["seconds"].items():
        print(f"  {seconds:8.3f} s  {what}")
    print(
        f"  {found['planning_seconds']:8.3f} s  planning in all, of one core: "
        + ("within" if found["planning_seconds"] <= found["goal_seconds"] else "MORE THAN")
        + f" the goal of {found['goal_seconds']} s"
    )
    print(f"  {found['peak_bytes'] / 1e9:8.3f} GB peak memory (goal 1 GiB = 1.074 GB)")
    print(f"  {found['push_copies']} copies in the push, {found['pull_copies']} in the pulls")
    for what in ("push", "pull"):
        each = found[f"{what}_bytes_per_rank"]
        print(
            f"  {what}: a rank moves {each['median'] / 1e9:.3f} GB ({each['min'] / 1e9:.3f} to {each['max'] / 1e9:.3f})"
        )
    twice = found["bytes"] - found["push_bytes"]
    print(f"  pushed in all {found['push_bytes']} bytes; {twice} more are written twice, for further predictions")


if __name__ == "__main__":
    main()
