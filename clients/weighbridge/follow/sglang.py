"""An SGLang server, over its own HTTP API. What it serves is what its ranks report, not what was requested."""

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
    "dp_size": "SGLang takes no new weights with data parallelism",
    "tokenizer_worker_num": "only one of these processes would name the new version in its answers",
}
"""Settings by which several parts answer at one address, and why they cannot be updated together."""


_OTHER = "if it is a vLLM, say so: --engine vllm; else install a release of SGLang that weighbridge supports"


class SglangServer:
    """A running SGLang server with weighbridge installed next to it.

    Args:
        url: of its HTTP API, such as ``http://127.0.0.1:30000``.
        service: ``host:port`` of the service's gRPC face, as the engine reaches it.
        model: ``namespace/name``.
        api_key: the server's admin key, if it has one.
        lane: how weights travel to the engine's ranks, as for `weighbridge.Client`; None leaves it to their environment.
        pause_mode: what happens to requests under way. ``retract`` lets them wait, and computes what they have so far again, by the new
            weights; ``in_place`` lets them go on from what the old weights have computed; ``abort`` ends them.
        timeout: seconds for each call; for `prepare`, for all of it.
        reported: whether the agent reports to the service what the engine serves, which then does not report it itself.
        stale_drafter: policy for versions that leave the drafter of speculative decoding behind: the engine is to ``refuse``, as by default, or to
            ``allow`` them.
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
            raise InvalidArgument(f"{url!r} is no HTTP address", fix="as in http://127.0.0.1:30000")
        if pause_mode not in PAUSE_MODES:
            raise InvalidArgument(
                f"there is no pause mode {pause_mode!r}", fix=f"one of {', '.join(PAUSE_MODES)}"
            )
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
        """Check that the server is one engine that answers. SGLang needs nothing before an update.

        Raises:
            FailedPrecondition: it has several engines or API servers.
            EngineFailed: it cannot be reached, or has no plug-in.
        """
        self._check_single()
        self._ranks()

    def serving(self) -> Serving:
        """State of the engine, as all ranks report it.

        Raises:
            EngineFailed: it cannot be reached, or has no plug-in.
        """
        return serving_of(self._ranks(), self.model)

    def prepare(self, version: int) -> Prepared:
        """Bring a version to the engine's machines while it serves; returns when it is there.

        Raises:
            FailedPrecondition: a rank cannot take it, or its bytes did not come; says why. Or adapters are loaded, which are on another version.
            DeadlineExceeded: not in time.
            EngineFailed: the server cannot be reached, or refuses.
        """
        self._request(version)
        self._check_no_adapters(version)
        told = self._named(self._control(f"{PREPARE} {self._order(version)}"))
        return wait_prepared(told, self._ranks, self.model, version, self.timeout)

    def answer(self, tokens: Sequence[int]) -> Mapping[str, Answer]:
        """Log probabilities that the engine gives the tokens of a prompt. Its cache of prefixes is asked first: the other request would fill it anew.

        Raises:
            FailedPrecondition: the engine sleeps.
            EngineFailed: it does not answer, or takes no such prompt, as one with ids outside its vocabulary.
        """
        self._check_awake()
        api = replace(self.api, timeout=min(self.timeout, ASK_SECONDS))
        last, whole = (api.call(_GENERATE, body) for body in (sglang_last(tokens), sglang_whole(tokens)))
        with understood(self.url + _GENERATE):
            return {"": Answer(read_sglang_whole(whole, tokens), read_sglang_last(last, tokens[-1]))}

    def answer_token(self) -> None:
        """Have the engine answer one token (`AnswersToken`).

        Raises:
            FailedPrecondition: the engine sleeps.
            EngineFailed: it does not answer.
        """
        self._check_awake()
        said = replace(self.api, timeout=min(self.timeout, ASK_SECONDS)).call(_GENERATE, sglang_token())
        with understood(self.url + _GENERATE):
            check_sglang_token(said)

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        """Load a version of an adapter, which requests then name ``acme/alice@18``, even if it was named by a ref: a ref is resolved once.

        Args:
            client: of the service.
            adapter: ``namespace/name``.
            version: a number or a ref; by default the latest.
            folder: a folder that this process and the engine see, to which the adapter is exported. Without one its tensors go with the request.

        Raises:
            NotFound: no such adapter or version.
            FailedPrecondition: the engine serves another version than the adapter is on (names both), takes no adapters, or cannot serve this one;
                says why, before anything is loaded.
            EngineFailed: it cannot be reached, or refuses.
        """
        return sglang_adapters.load(self, client, adapter, version, folder)

    def unload_adapter(self, adapter: str, version: int) -> None:
        """Unload a version of an adapter, once requests under way with it have ended. Raises EngineFailed."""
        sglang_adapters.unload(self, f"{adapter}@{version}")

    def adapters(self) -> tuple[str, ...]:
        """The adapters that the server has, such as ``acme/alice@18``. Raises EngineFailed."""
        return sglang_adapters.loaded(self)

    def _check_awake(self) -> None:
        """Raise FailedPrecondition if memory of the engine is released: SGLang takes requests then, and may end by them. One without weighbridge does not
        say it."""
        said: Any = None
        with suppress(EngineFailed, FailedPrecondition):
            said = self._control(STATUS)
        if isinstance(said, dict) and (asleep := said.get("asleep")):
            raise FailedPrecondition(
                f"the engine sleeps, without memory for {', '.join(map(str, asleep))}",
                fix="wake it up: POST /resume_memory_occupation",
            )

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence of what all ranks compute with, by what errors call each.

        Args:
            known: digests of recordings that they need not send.

        Raises:
            FailedPrecondition: a rank has none, or the server has several engines.
        """
        self._check_single()
        said = self._control(f"{EVIDENCE} {','.join(known)} {self._order('latest')}")
        with understood(self.url + _CONTROL):
            return {f"rank {at}": Evidence.from_json(each) for at, each in enumerate(said["evidence"])}

    def compare_with_load(self) -> Mapping[str, RankProof]:
        """Let all ranks load the version that they have again by SGLang's own loader, while the engine is paused, and say what that has changed.

        Raises:
            FailedPrecondition: a rank cannot.
        """
        said = self._control(COMPARE)
        with understood(self.url + _CONTROL):
            return {f"rank {at}": RankProof.from_json(each) for at, each in enumerate(said["proofs"])}

    def discard(self) -> None:
        """Let the engine forget what has been prepared."""
        self._control(DISCARD)

    def pause(self) -> None:
        """Stop generating. Requests that come meanwhile wait."""
        self.api.call("/pause_generation", {"mode": self.pause_mode})

    def apply(self, version: int, label: str) -> None:
        """Put a version into the parameters of all ranks, best while the engine is paused. Answers name it from then on, as their
        ``weight_version``, and prefixes that the old weights have computed are forgotten.

        Raises:
            FailedPrecondition: adapters are loaded; names them.
            EngineFailed: the server cannot be reached; or it refuses, as while another update is under way, and keeps what it has.
        """
        request = {**self._request(version), "weight_version": label}
        self._check_no_adapters(version)
        with self._session():
            self.api.call("/update_weights_from_tensor", request)

    def resume(self) -> None:
        """Go on generating."""
        self.api.call("/continue_generation", {"torch_empty_cache": False})

    def label(self, label: str) -> None:
        """Set SGLang's ``weight_version``; requests under way go on."""
        self.api.call("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's own session around an update, for as long as it lasts. Releases up to 0.5.15 have none."""
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
        """The request that brings a version. To make it can take seconds (torch is imported), so it is made before the engine is paused."""
        if version not in self._requests:
            payload, info = _payload(self._order(version)), self.api.call(_INFO)
            with understood(self.url + _INFO):
                ranks, self._takes_adapters = int(info["tp_size"]), bool(info.get("enable_lora"))
            self._requests = {
                version: {
                    "serialized_named_tensors": [payload] * ranks,
                    "load_format": LOAD_FORMAT,
                    "selector": "target",
                    "disable_draft_model": True,  # how releases without a selector say it
                    "flush_cache": self.pause_mode != "in_place",
                }
            }
        return self._requests[version]

    def _check_no_adapters(self, version: int) -> None:
        """Refuse to put a version below adapters, which are on another one. SGLang would compute with them. Raises FailedPrecondition."""
        there = self.adapters() if self._takes_adapters else ()
        if there and (known := self.serving()).version != version:
            of = f", on {self.model}@{known.version}" if known.version else ""
            raise FailedPrecondition(
                f"{self.url} has {named(there)}{of}, and an update to {self.model}@{version} would take their base away",
                fix=f"unload them before: weighbridge adapters {there[0]} --url {self.url} --unload",
            )

    def _order(self, version: int | str) -> str:
        return replace(self._wanted, version=str(version)).to_json()

    def _ranks(self) -> Ranks:
        return self._named(self._control(self._status))

    def _named(self, said: Any) -> Ranks:
        with understood(self.url + _CONTROL):
            return {f"rank {at}": Status.from_json(found) for at, found in enumerate(said["ranks"])}

    def _check_single(self) -> None:
        """Refuse a server of which a request reaches one part, while others may go on with other weights or another label."""
        info = self.api.call(_INFO)
        with understood(self.url + _INFO):
            counts = {setting: int(info.get(setting) or 1) for setting in _SEVERAL}
        for setting, why in _SEVERAL.items():
            if (count := counts[setting]) > 1:
                option = f"--{setting.replace('_', '-')}"
                raise FailedPrecondition(
                    f"{self.url} was started with {option} {count}, and {why}",
                    fix=f"start it without {option}; to answer more, start several servers, with an agent beside each",
                )

    def _control(self, action: str) -> Any:
        answer = self.api.call(_CONTROL, {"action": action})
        with understood(self.url + _CONTROL):
            message = str(answer["message"])
        try:
            return json.loads(message)
        except ValueError as error:
            raise FailedPrecondition(
                f"{self.url} does not know {action.partition(' ')[0]}",
                fix="install weighbridge in the environment of SGLang, and start the server again",
            ) from error


def is_sglang(url: str, api_key: str = "", timeout: float = 30.0) -> bool:
    """Test whether an SGLang answers at an address, and not a vLLM.

    Raises:
        EngineFailed: nothing answers there, or it refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        info = EngineApi(url.rstrip("/"), timeout, _OTHER, headers).call(_INFO)
    except NoRoute:
        return False
    return isinstance(info, dict) and "tp_size" in info


def _payload(text: str) -> str:
    """A text as a named tensor, as SGLang takes it: pickled, of nothing but types that it lets through."""
    import pickle

    import torch

    return base64.b64encode(pickle.dumps([(text, torch.empty(0))])).decode()
