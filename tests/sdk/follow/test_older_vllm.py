"""Does the driver update a vLLM that has no label for its weights, as 0.24, and put one on those that have?

The server has the routes of that release (``entrypoints/serve/dev``), or those of 0.29 besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.json_servers import Answer, json_server
from weighbridge.follow.vllm import VllmServer


@contextmanager
def vllm(has_labels: bool, labels: list[str]) -> Iterator[str]:
    """A server of one worker that can do what it is asked for."""

    def answer(path: str, body: dict[str, Any]) -> Answer:
        match path:
            case "/collective_rpc":
                assert body == {"method": "weighbridge_apply", "args": ["2", ""]}
                return 200, {"results": [{"served": "acme/tiny@2", "failed": ""}]}
            case "/get_world_size":
                return 200, {"world_size": 1}
            case "/update_weight_version" if has_labels:
                labels.append(body["new_version"])
                return 200, {}
        return 404, {"detail": "Not Found"}

    with json_server(answer) as url:
        yield url


@pytest.mark.parametrize(("has_labels", "expected"), [(False, ["default"]), (True, ["default", "acme/tiny@2"])])
def test_a_label_is_put_on_weights_where_the_release_has_one(has_labels: bool, expected: list[str]) -> None:
    labels = ["default"]
    with vllm(has_labels, labels) as url:
        VllmServer(url, "acme/tiny", "127.0.0.1:50051").apply(2, "acme/tiny@2")
    assert labels == expected
