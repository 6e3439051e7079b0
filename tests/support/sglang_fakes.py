"""Servers shaped like SGLang's, whose tensor-parallel ranks pull what they hold of a version from a real service.

They answer as SGLang 0.5.23 with the plug-in does (`tests/engines/test_sglang_server.py`), and keep what each version
has brought.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tests.support.json_servers import json_server
from weighbridge import EngineClient, TensorParallel
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.wanted import Wanted

Slices = dict[str, Tensor]


class FakeSglang:
    """One engine.

    Attributes:
        url: URL of its server.
        calls: requests in the order in which they came.
        history: slices of each rank and the label, of each version that it has taken.
        holds: bytes of its slices.
        paused: whether it stands still.
        refuse: calls that it refuses, by the version's number: ``prepare`` or ``apply``.
        info: fields of its server info besides ``tp_size``.
        adapters: tensors and config of each adapter that it has, by its name; of one from a folder, the folder.
        loading: called when an adapter is loaded.
    """

    def __init__(self, tp: int) -> None:
        self.url = ""
        self.calls: list[str] = []
        self.history: list[tuple[str, list[Slices], str]] = []
        self.holds = 0
        self.paused = False
        self.refuse: dict[str, str] = {}
        self.info: dict[str, Any] = {}
        self.adapters: dict[str, Any] = {}
        self.loading: Callable[[], None] = lambda: None
        self._tp = tp
        self._served = self._prepared = ""
        self._slices: list[Slices] = []
        self._error = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and content of an answer."""
        self.calls.append(path if path != "/weights_checker" else body["action"].partition(" ")[0])
        match path:
            case "/server_info":
                return 200, {"tp_size": self._tp, **self.info}
            case "/v1/models":
                cards = [
                    {"id": "fake", "parent": None},
                    *({"id": each, "parent": "fake"} for each in self.adapters),
                ]
                return 200, {"data": cards}
            case "/load_lora_adapter_from_tensors" if "from_tensors" not in self.refuse:
                payloads = [pickle.loads(base64.b64decode(each)) for each in body["serialized_named_tensors"]]
                return self._adapter(body["lora_name"], (payloads, body["config_dict"]))
            case "/load_lora_adapter":
                return self._adapter(body["lora_name"], body["lora_path"])
            case "/unload_lora_adapter":
                known = self.adapters.pop(body["lora_name"], None) is not None
                return 200 if known else 400, {"success": known, "error_message": "does not exist"}
            case "/weights_checker":
                return self._checker(body)
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/begin_weight_update" | "/end_weight_update":
                pass
            case "/update_weights_from_tensor":
                return self._apply(body)
            case _:
                return 404, {}
        return _said(True, "")

    def _adapter(self, name: str, found: Any) -> tuple[int, dict[str, Any]]:
        if name in self.adapters:
            return 400, {"success": False, "error_message": "already loaded"}
        self.adapters[name] = found
        self.loading()
        return 200, {"success": True}

    def serve(self, label: str) -> None:
        """Say from now on that all ranks serve this version."""
        self._served = label

    def _checker(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        action, _, order = body["action"].partition(" ")
        if action == "weighbridge.prepare":
            self._prepare(Wanted.from_json(order or body["skip_tensor_list"][0]))
        elif action == "weighbridge.discard":
            self._prepared, self._slices = "", []
        rank = {
            "served": self._served, "prepared": self._prepared, "nbytes": self.holds // self._tp, "error": self._error
        }  # fmt: skip
        return _said(True, json.dumps({"ranks": [rank] * self._tp}))

    def _prepare(self, wanted: Wanted) -> None:
        self._prepared, self._error = "", ""
        try:
            if self.refuse.get(wanted.version) == "prepare":
                raise WeighbridgeError("made up")
            with EngineClient(wanted.server, retry_seconds=wanted.retry_seconds) as client:
                self._slices = [
                    {
                        name: tensor.clone()
                        for name, tensor in client.pull(
                            wanted.model, int(wanted.version), layout=TensorParallel(self._tp, rank)
                        )
                    }
                    for rank in range(self._tp)
                ]
        except WeighbridgeError as error:
            self._error = str(error)
            return
        self.holds = sum(tensor.nbytes for rank in self._slices for tensor in rank.values())
        self._prepared = str(wanted)

    def _apply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        [(text, _)] = pickle.loads(base64.b64decode(body["serialized_named_tensors"][-1]))
        wanted = Wanted.from_json(text)
        assert len(body["serialized_named_tensors"]) == self._tp
        if not self.paused or str(wanted) != self._prepared or self.refuse.get(wanted.version) == "apply":
            return _said(False, "made up")
        self._served, self._prepared = self._prepared, ""
        self.history.append((self._served, self._slices, body["weight_version"]))
        return _said(True, "")


def _said(success: bool, message: str) -> tuple[int, dict[str, Any]]:
    return 200 if success else 400, {"success": success, "message": message}


@contextmanager
def fake_sglang(tp: int = 2) -> Iterator[FakeSglang]:
    """An engine whose server answers until the end."""
    engine = FakeSglang(tp)
    with json_server(engine.answer) as engine.url:
        yield engine
