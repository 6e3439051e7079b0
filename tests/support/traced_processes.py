"""Processes of a traced push: a trainer's rank, and an engine that speaks the routes of a vLLM server and fetches
weights by the SDK.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from weighbridge.follow.status import Status, label


def push(server: str, model: str, folder: str, rank: str, ranks: str, step: str, lane: str) -> None:
    """Push a rank's part of a folder's tensors, and wait until the version is durable; prints the version's number."""
    from safetensors.torch import load_file

    from weighbridge import TrainerClient

    with TrainerClient(server, lane=lane) as trainer:
        state = {name: tensor * int(step) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        handle = trainer.push_state_dict(model, state, step=int(step), rank=int(rank), world_size=int(ranks))
        print(handle.wait("durable", timeout=120).number, flush=True)


def engine(server: str, model: str, lane: str) -> None:
    """Answer an agent until killed; the first printed line is the address."""
    from tests.support.json_servers import json_server
    from weighbridge import EngineClient

    client = EngineClient(server, lane=lane)
    held: dict[str, Any] = {"status": Status()}

    def rpc(method: str, arguments: list[str]) -> None:
        status: Status = held["status"]
        match method:
            case "weighbridge_prepare":
                pull = client.pull(model, int(arguments[0]))
                nbytes = sum(tensor.nbytes for _, tensor in pull)
                prepared = label(model, int(arguments[0]))
                held["status"] = Status(served=status.served, prepared=prepared, nbytes=nbytes, seconds=0.01)
            case "weighbridge_apply":
                held["status"] = Status(served=label(model, int(arguments[0])))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/collective_rpc":
            rpc(body["method"], body["args"])
            worker = {"failed": "", "engine": 0, "engines": 1, "rank": 0, "ranks": 1}
            return 200, {"results": [{**held["status"].to_json(), **worker}]}
        return 200, {}

    with json_server(answer) as url:
        print(json.dumps(url), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"push": push, "engine": engine}[sys.argv[1]](*sys.argv[2:])
