"""Driver of an SGLang server, through its own HTTP API.

The served version is the one that its ranks report, not the requested one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._core.text.counts import named
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.follow import sglang_adapters
from weighbridge.follow.adapters import LoadedAdapter
from weighbridge.follow.answers import EngineApi, NoRoute, understood
from weighbridge.follow.completions import (
    ASK_SECONDS,
    check_sglang_token,
    read_sglang_last,
    read_sglang_whole,
    sglang_last,
    sglang_token,
    sglang_whole,
)
from weighbridge.follow.engines import (
    EngineFailed,
    Prepared,
    Ranks,
    Serving,
    StaleDrafter,
    serving_of,
    wait_prepared,
)
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.golden import Answer
from weighbridge.follow.status import Status
from weighbridge.follow.wanted import (
    COMPARE,
    DISCARD,
    EVIDENCE,
    LOAD_FORMAT,
    PREPARE,
    REPORTED,
    STATUS,
    Wanted,
)

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient

_INFO, _CONTROL, _GENERATE = "/server_info", "/weights_checker", "/generate"
PAUSE_MODES = ("retract", "in_place", "abort")
_SEVERAL = {
    "dp_size": "SGLang does not accept new weights with data parallelism",
    "tokenizer_worker_num": "only one of these processes would name the new version in its answers",
}
"""Settings with which several parts share one address, and why they cannot be updated together."""


_OTHER = "if it is a vLLM server, use --engine vllm; otherwise install a release of SGLang that weighbridge supports"


class SglangServer:
    """A running SGLang server with weighbridge installed next to it.

    Args:
        url: URL of its HTTP API, such as ``http://127.0.0.1:30000``.
        service: ``host:port`` of the service's gRPC endpoint, as the engine reaches it.
        model: ``namespace/name``.
        api_key: the server's admin key, if it has one.
        lane: how weights travel to the engine's ranks, as for `weighbridge.Client`; None uses their environment.
        pause_mode: what happens to running requests. ``retract`` makes them wait and recomputes their tokens with the
            new weights; ``in_place`` continues them from the results of the old weights; ``abort`` ends them.
        timeout: seconds for each call; for `prepare`, for the whole preparation.
        reported: whether the agent reports the served version to the service; the engine then does not report it.
        stale_drafter: policy for versions that leave the drafter of speculative decoding behind: ``refuse`` (default)
            or ``allow`` them.
    """

    def __init__(
        self,
        url: str,
        service: str,
        model: str,
        *,
        api_key: str = "",
        lane: str | None = None,
        pause_mode: str = "retract",
        timeout: float = 600.0,
        reported: bool = False,
        stale_drafter: StaleDrafter | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgument(f"{url!r} is not an HTTP URL", fix="as in http://127.0.0.1:30000")
        if pause_mode not in PAUSE_MODES:
            raise InvalidArgument(f"there is no pause mode {pause_mode!r}", fix=f"one of {', '.join(PAUSE_MODES)}")
        self.url = url.rstrip("/")
        self.model = model
        self.pause_mode = pause_mode
        self.timeout = timeout
        self._status = f"{STATUS} {REPORTED}" if reported else STATUS
        self._requests: dict[int, dict[str, Any]] = {}
        self._takes_adapters = False
        self._wanted = Wanted(service, model, lane=lane, stale_drafter=stale_drafter)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.api = EngineApi(self.url, timeout, _OTHER, headers)

    def connect(self) -> None:
        """Check that the server is a single engine and responds. SGLang needs no setup before an update.

        Raises:
            FailedPrecondition: it has several engines or API servers.
            EngineFailed: it is unreachable, or has no plug-in.
        """
        self._check_single()
        self._ranks()

    def serving(self) -> Serving:
        """State of the engine, as all ranks report it.

        Raises:
            EngineFailed: it is unreachable, or has no plug-in.
        """
        return serving_of(self._ranks(), self.model)

    def prepare(self, version: int) -> Prepared:
        """Fetch a version to the engine's machines while it serves; returns when it has arrived.

        Raises:
            FailedPrecondition: a rank cannot load the version, or its bytes did not arrive; states why. Or adapters of
                another version are loaded.
            DeadlineExceeded: the timeout has passed.
            EngineFailed: the server is unreachable, or refuses.
        """
        self._request(version)
        self._check_no_adapters(version)
        told = self._named(self._control(f"{PREPARE} {self._order(version)}"))
        return wait_prepared(told, self._ranks, self.model, version, self.timeout)

    def answer(self, tokens: Sequence[int]) -> Mapping[str, Answer]:
        """Log probabilities that the engine assigns to the tokens of a prompt. The request that uses the prefix cache
        comes first, because the other request would refill the cache.

        Raises:
            FailedPrecondition: the engine sleeps.
            EngineFailed: it does not respond, or rejects the prompt, for example because of ids outside its vocabulary.
        """
        self._check_awake()
        api = replace(self.api, timeout=min(self.timeout, ASK_SECONDS))
        last, whole = (api.call(_GENERATE, body) for body in (sglang_last(tokens), sglang_whole(tokens)))
        with understood(self.url + _GENERATE):
            return {"": Answer(read_sglang_whole(whole, tokens), read_sglang_last(last, tokens[-1]))}

    def answer_token(self) -> None:
        """Make the engine generate one token (`AnswersToken`).

        Raises:
            FailedPrecondition: the engine sleeps.
            EngineFailed: it does not respond.
        """
        self._check_awake()
        said = replace(self.api, timeout=min(self.timeout, ASK_SECONDS)).call(_GENERATE, sglang_token())
        with understood(self.url + _GENERATE):
            check_sglang_token(said)

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        """Load a version of an adapter.

        Requests then name it ``acme/alice@18``, even if it was loaded by a ref: a ref is resolved once.

        Args:
            client: of the service.
            adapter: ``namespace/name``.
            version: a number or a ref; by default the latest.
            folder: a folder that this process and the engine can access; the adapter is exported to it. Without a
                folder, the request contains the tensors.

        Raises:
            NotFound: the adapter or version does not exist.
            FailedPrecondition: the engine does not serve the adapter's base version (the error names both), does not
                accept adapters, or cannot serve this one; states why, before anything is loaded.
            EngineFailed: it is unreachable, or refuses.
        """
        return sglang_adapters.load(self, client, adapter, version, folder)

    def unload_adapter(self, adapter: str, version: int) -> None:
        """Unload a version of an adapter once running requests that use it have ended. Raises EngineFailed."""
        sglang_adapters.unload(self, f"{adapter}@{version}")

    def adapters(self) -> tuple[str, ...]:
        """The adapters that the server has, such as ``acme/alice@18``. Raises EngineFailed."""
        return sglang_adapters.loaded(self)

    def _check_awake(self) -> None:
        """Raise FailedPrecondition if memory of the engine is released: SGLang still accepts requests then, and may
        crash. An SGLang without weighbridge does not report this state.
        """
        said: Any = None
        with suppress(EngineFailed, FailedPrecondition):
            said = self._control(STATUS)
        if isinstance(said, dict) and (asleep := said.get("asleep")):
            raise FailedPrecondition(
                f"the engine sleeps, without memory for {', '.join(map(str, asleep))}",
                fix="wake it up: POST /resume_memory_occupation",
            )

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence of the parameters of all ranks, by their names in errors.

        Args:
            known: digests of recordings that need not be sent.

        Raises:
            FailedPrecondition: a rank has none, or the server has several engines.
        """
        self._check_single()
        said = self._control(f"{EVIDENCE} {','.join(known)} {self._order('latest')}")
        with understood(self.url + _CONTROL):
            return {f"rank {at}": Evidence.from_json(each) for at, each in enumerate(said["evidence"])}

    def compare_with_load(self) -> Mapping[str, RankProof]:
        """Make all ranks load their version again with SGLang's own loader, while the engine is paused, and report the
        changes.

        Raises:
            FailedPrecondition: a rank cannot.
        """
        said = self._control(COMPARE)
        with understood(self.url + _CONTROL):
            return {f"rank {at}": RankProof.from_json(each) for at, each in enumerate(said["proofs"])}

    def discard(self) -> None:
        """Make the engine discard the prepared version."""
        self._control(DISCARD)

    def pause(self) -> None:
        """Stop generating. New requests wait."""
        self.api.call("/pause_generation", {"mode": self.pause_mode})

    def apply(self, version: int, label: str) -> None:
        """Write a version into the parameters of all ranks, preferably while the engine is paused. From then on
        responses name it as their ``weight_version``, and prefixes cached with the old weights are dropped.

        Raises:
            FailedPrecondition: adapters are loaded; names them.
            EngineFailed: the server is unreachable; or it refuses, for example during another update, and keeps its
                weights.
        """
        request = {**self._request(version), "weight_version": label}
        self._check_no_adapters(version)
        with self._session():
            self.api.call("/update_weights_from_tensor", request)

    def resume(self) -> None:
        """Resume generating."""
        self.api.call("/continue_generation", {"torch_empty_cache": False})

    def label(self, label: str) -> None:
        """Set SGLang's ``weight_version``; running requests continue."""
        self.api.call("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's own session around an update. Releases up to 0.5.15 have no sessions."""
        try:
            self.api.call("/begin_weight_update", {"selector": "target"})
        except NoRoute:
            yield
            return
        try:
            yield
        finally:
            self.api.call("/end_weight_update", {})

    def _request(self, version: int) -> dict[str, Any]:
        """The request that loads a version.

        Creating it can take seconds (torch is imported), so it is created before the engine is paused.
        """
        if version not in self._requests:
            payload, info = _payload(self._order(version)), self.api.call(_INFO)
            with understood(self.url + _INFO):
                ranks, self._takes_adapters = int(info["tp_size"]), bool(info.get("enable_lora"))
            self._requests = {
                version: {
                    "serialized_named_tensors": [payload] * ranks,
                    "load_format": LOAD_FORMAT,
                    "selector": "target",
                    "disable_draft_model": True,  # setting in releases without a selector
                    "flush_cache": self.pause_mode != "in_place",
                }
            }
        return self._requests[version]

    def _check_no_adapters(self, version: int) -> None:
        """Refuse to update the base while adapters of another version are loaded, because SGLang would compute with
        them.

        Raises FailedPrecondition.
        """
        there = self.adapters() if self._takes_adapters else ()
        if there and (known := self.serving()).version != version:
            of = f", on {self.model}@{known.version}" if known.version else ""
            raise FailedPrecondition(
                f"{self.url} has {named(there)}{of}, and an update to {self.model}@{version} would replace their base",
                fix=f"unload them first: weighbridge adapters {there[0]} --url {self.url} --unload",
            )

    def _order(self, version: int | str) -> str:
        return replace(self._wanted, version=str(version)).to_json()

    def _ranks(self) -> Ranks:
        return self._named(self._control(self._status))

    def _named(self, said: Any) -> Ranks:
        with understood(self.url + _CONTROL):
            return {f"rank {at}": Status.from_json(found) for at, found in enumerate(said["ranks"])}

    def _check_single(self) -> None:
        """Refuse a server if a request reaches only one part of it, while other parts may continue with other weights
        or another label.
        """
        info = self.api.call(_INFO)
        with understood(self.url + _INFO):
            counts = {setting: int(info.get(setting) or 1) for setting in _SEVERAL}
        for setting, why in _SEVERAL.items():
            if (count := counts[setting]) > 1:
                option = f"--{setting.replace('_', '-')}"
                raise FailedPrecondition(
                    f"{self.url} was started with {option} {count}, and {why}",
                    fix=(
                        f"start it without {option}; to serve more requests, start several "
                        "servers, each with its own agent"
                    ),
                )

    def _control(self, action: str) -> Any:
        answer = self.api.call(_CONTROL, {"action": action})
        with understood(self.url + _CONTROL):
            message = str(answer["message"])
        try:
            return json.loads(message)
        except ValueError as error:
            raise FailedPrecondition(
                f"{self.url} does not support {action.partition(' ')[0]}",
                fix="install weighbridge in the environment of SGLang, and restart the server",
            ) from error


def is_sglang(url: str, api_key: str = "", timeout: float = 30.0) -> bool:
    """Test whether the server at an address is SGLang rather than vLLM.

    Raises:
        EngineFailed: nothing responds there, or the server refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        info = EngineApi(url.rstrip("/"), timeout, _OTHER, headers).call(_INFO)
    except NoRoute:
        return False
    return isinstance(info, dict) and "tp_size" in info


def _payload(text: str) -> str:
    """A string as a named tensor in SGLang's format: pickled, with only the types that it accepts."""
    import pickle

    import torch

    return base64.b64encode(pickle.dumps([(text, torch.empty(0))])).decode()
