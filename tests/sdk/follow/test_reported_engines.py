"""Does an agent that reports say so to the engine?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.json_servers import json_server
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.vllm import VllmServer

MODEL = "acme/tiny"


@pytest.mark.parametrize("reported", [True, False])
def test_a_vllm_is_told_when_it_is_connected(reported: bool) -> None:
    asked: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        asked.append(json.loads(body["args"][0]))
        return 200, {"results": [{"failed": ""}]}

    with json_server(answer) as url:
        VllmServer(url, MODEL, "service:1", reported=reported).connect()
    assert asked == [{"server": "service:1", "model": MODEL} | ({"reported": True} if reported else {})]


@pytest.mark.parametrize("reported", [True, False])
def test_an_sglang_is_told_when_it_is_asked_how_it_stands(reported: bool) -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/server_info":
            return 200, {"dp_size": 1}
        asked.append(body["action"])
        return 200, {"success": True, "message": json.dumps({"ranks": [{"served": ""}]})}

    with json_server(answer) as url:
        SglangServer(url, "service:1", MODEL, reported=reported).connect()
    assert asked == ["weighbridge.status reported" if reported else "weighbridge.status"]
