"""Driver of a vLLM server, through the routes that it has with ``VLLM_SERVER_DEV_MODE=1``.

A server with data parallelism has several engines, and vLLM returns only the first one's response. With weighbridge's
plug-in, the server returns the responses of all engines, and each worker identifies itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.follow import vllm_adapters
from weighbridge.follow.adapters import LoadedAdapter
from weighbridge.follow.answers import EngineApi, NoRoute, understood
from weighbridge.follow.completions import (
    ASK_SECONDS,
    check_vllm_token,
    read_vllm_last,
    read_vllm_whole,
    vllm_last,
    vllm_token,
    vllm_whole,
)
from weighbridge.follow.engines import (
    EngineFailed,
    Prepared,
    Ranks,
    Serving,
    StaleDrafter,
    WhenAsleep,
    check_same_ranks,
    serving_of,
    wait_prepared,
)
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.golden import Answer
from weighbridge.follow.status import Status, drafter_in, is_version
from weighbridge.follow.status import label as label_of

if TYPE_CHECKING:
    from weighbridge._clients.engine import EngineClient

PauseMode = Literal["wait", "keep", "abort"]
_PREPARE_SECONDS = 3600.0
_LOOK_SECONDS = 0.5
_COMPLETIONS, _RANK = "/v1/completions", "X-data-parallel-rank"
_WORKERS = "/collective_rpc"
"""Route of calls to all workers."""
OTHER = "start it with VLLM_SERVER_DEV_MODE=1; if it is an SGLang server, use --engine sglang"
"""Hint if a server lacks a route."""
Answers = Sequence[Mapping[str, Any]]
"""JSON of workers: one `Status` each, with ``failed``, ``engine``, ``rank``, ``ranks`` (of that engine), ``group`` (of
ranks that agree) and ``engines`` (behind the server)."""


class VllmServer:
    """One server, with all ranks of all engines behind it.

    Args:
        url: URL of the server, such as ``http://127.0.0.1:8000``.
        model: ``namespace/name`` at the service.
        server: the service's gRPC address as the engine's workers reach it.
        lane: how weights travel to them; None keeps the engine's start setting.
        pause_mode: treatment of running requests: ``wait`` for them, ``keep`` them paused and continue them with the
            new weights, or ``abort`` them.
        timeout: seconds for one call.
        reported: whether the agent reports the served version to the service; the engine then does not report it.
        when_asleep: policy for updates of the engine while its weights sleep (vLLM's sleep mode): they ``wait`` for the
            wake-up, or the engine should ``refuse`` them; None keeps the engine's start setting.
        api_key: the server's key (``--api-key``), if it has one.
        stale_drafter: policy for updates that leave the drafter of speculative decoding behind: ``refuse`` or ``allow``
            them; None keeps the engine's start setting.

    Attributes:
        draft: the drafter's version that goes with versions from now on (`TakesDrafter`).
    """

    def __init__(
        self,
        url: str,
        model: str,
        server: str,
        *,
        lane: str | None = None,
        pause_mode: PauseMode = "wait",
        timeout: float = 600.0,
        reported: bool = False,
        when_asleep: WhenAsleep | None = None,
        api_key: str = "",
        stale_drafter: StaleDrafter | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._model = model
        more: dict[str, Any] = ({"lane": lane} if lane else {}) | ({"reported": True} if reported else {})
        if when_asleep is not None:
            more["when_asleep"] = when_asleep
        if stale_drafter is not None:
            more["stale_drafter"] = stale_drafter
        self._init_info = {"server": server, "model": model, **more}
        self._pause_mode = pause_mode
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._api = EngineApi(self.url, timeout, OTHER, headers)
        self.draft = ""
        self._told: Ranks = {}

    def wait_ready(self, seconds: float) -> None:
        """Return when the server responds.

        Raises:
            EngineFailed: it does not respond within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._api.call("/health")
            except EngineFailed:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_LOOK_SECONDS)

    def connect(self) -> None:
        """Give all workers the source of versions. They determine which slices they need, if they do not know yet.

        Raises:
            FailedPrecondition: a worker cannot, or not all workers behind the server respond.
        """
        self._ask_workers("weighbridge_connect", json.dumps(self._init_info))

    def serving(self) -> Serving:
        """State of the engines, as all workers report it."""
        return serving_of(self._ask_workers("weighbridge_status"), self._model)

    def begin(self, version: int) -> None:
        """Request all workers to prepare a version; returns immediately.

        Raises:
            FailedPrecondition: a worker cannot, or not all workers behind the server respond.
        """
        self._told = self._ask_workers("weighbridge_prepare", str(version), self.draft)

    def prepare(self, version: int) -> Prepared:
        """Request all workers to prepare, and wait until they have."""
        self.begin(version)
        return wait_prepared(
            self._told,
            lambda: self._ask_workers("weighbridge_status"),
            self._model,
            version,
            _PREPARE_SECONDS,
            self.draft,
        )

    def prepare_early(self, version: int) -> None:
        """Request all workers to fetch a version as its parts arrive."""
        self._ask_workers("weighbridge_prepare_early", str(version))

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence of the parameters of all workers, by their names in errors.

        Args:
            known: digests of recordings that need not be sent.

        Raises:
            FailedPrecondition: a worker has none, or not all workers behind the server respond.
        """
        answers = self._answers("weighbridge_evidence", ",".join(known))
        names = list(self._by_name(answers))
        with understood(self.url + _WORKERS):
            found = [Evidence.from_json(each["evidence"]) for each in answers]
        return dict(zip(names, found, strict=True))

    def compare_with_load(self) -> Mapping[str, RankProof]:
        """Make all workers load their version again with vLLM's own loader, while the engine is paused, and report the
        changes.

        Raises:
            FailedPrecondition: a worker cannot, or not all workers behind the server respond.
        """
        answers = self._answers("weighbridge_compare_with_load")
        names = list(self._by_name(answers))
        with understood(self.url + _WORKERS):
            found = [RankProof.from_json(each["proof"]) for each in answers]
        return dict(zip(names, found, strict=True))

    def answer(self, tokens: Sequence[int]) -> Mapping[str, Answer]:
        """Log probabilities that each engine behind the server assigns to the tokens of a prompt.

        Raises:
            FailedPrecondition: the engine sleeps, or is paused.
            EngineFailed: it does not respond, or rejects the prompt, for example because of ids outside its vocabulary.
        """
        return {name: _answer(api, tokens) for name, api in self._each_engine().items()}

    def answer_token(self) -> None:
        """Make each engine behind the server generate one token, concurrently (`AnswersToken`).

        Raises:
            FailedPrecondition: the engine sleeps, or is paused.
            EngineFailed: an engine does not respond.
        """
        apis = list(self._each_engine().values())
        if len(apis) == 1:  # a signal must be able to interrupt it
            _answer_token(apis[0])
            return
        with ThreadPoolExecutor(len(apis)) as pool:
            for _ in pool.map(_answer_token, apis):
                pass

    def _each_engine(self) -> Mapping[str, EngineApi]:
        """For token requests: the API of each engine behind the server, by the engine's name in errors; the name is
        empty if there is only one.

        Raises:
            FailedPrecondition: the engine sleeps, or is paused.
        """
        self._check_goes_on()
        count = self._count_engines()
        api = replace(self._api, timeout=min(self._api.timeout, ASK_SECONDS))
        if count == 1:
            return {"": api}
        return {f"engine {rank}": replace(api, headers={**api.headers, _RANK: str(rank)}) for rank in range(count)}

    def load_adapter(
        self, client: EngineClient, adapter: str, version: str | int | None = None, folder: Path | None = None
    ) -> LoadedAdapter:
        """Make all engines load a version of an adapter before a request names it. The server must have weighbridge's
        middleware for adapters; it fetches the adapter itself.

        Args:
            client: of the service.
            adapter: ``namespace/name``.
            version: a number or a ref, which is resolved once; by default the latest.
            folder: not supported: the server uses its own folder.

        Raises:
            NotFound: the adapter or version does not exist.
            InvalidArgument: a folder is named.
            EngineFailed: the server lacks the middleware, is unreachable, or refuses, for example because it does not
                serve the adapter's base version; states why.
        """
        if folder is not None:
            raise InvalidArgument(
                "vLLM's server fetches adapters itself",
                fix="do not name a folder: the server's WEIGHBRIDGE_CACHE names it",
            )
        number = version if isinstance(version, int) else client.version(adapter, version).number
        return vllm_adapters.load(self._api, f"{adapter}@{number}")

    def unload_adapter(self, adapter: str, version: int) -> None:
        """Make all engines unload a version of an adapter. Requests that name it, including running ones, load it
        again. Raises EngineFailed.
        """
        vllm_adapters.unload(self._api, f"{adapter}@{version}")

    def takes_adapters(self) -> bool:
        """Whether the engines accept adapters now: not while they are paused or asleep. Raises EngineFailed."""
        return not self._says("is_sleeping")

    def adapters(self) -> tuple[str, ...]:
        """Adapters of the service that all engines have in memory, such as ``acme/alice@18``. Raises EngineFailed."""
        return vllm_adapters.loaded(self._api)

    def _check_goes_on(self) -> None:
        """Raise FailedPrecondition if the engine sleeps or is paused: a request would wait for the wake-up or the
        resume, or crash the engine.
        """
        if self._says("is_sleeping"):
            raise FailedPrecondition("the engine sleeps", fix="wake it up: POST /wake_up")
        if self._says("is_paused"):
            raise FailedPrecondition("the engine is paused", fix="resume it: POST /resume")

    def _says(self, what: str) -> bool:
        with contextlib.suppress(NoRoute):
            said = self._api.call(f"/{what}")
            return isinstance(said, dict) and bool(said.get(what))
        return False

    def _count_engines(self) -> int:
        """Number of engines behind the server; one if it was not started with weighbridge."""
        with contextlib.suppress(NoRoute):
            answers = self._answers("weighbridge_status")
            with understood(self.url + _WORKERS):
                return max((int(each.get("engines", 1)) for each in answers), default=1)
        return 1

    def discard(self) -> None:
        """Request all workers to release their prepared version."""
        self._ask_workers("weighbridge_discard")

    def pause(self) -> None:
        """Pause. Returns when the engines no longer compute and caches of the old weights are empty."""
        self._api.call(f"/pause?mode={self._pause_mode}", {})

    def apply(self, version: int, label: str) -> None:
        """Apply a version, outside vLLM's own sessions: a session that another agent left open, or a failing worker,
        would end it for all.

        A sleeping engine may respond that the version waits for its wake-up.

        Raises:
            FailedPrecondition: an engine could not apply the version; the others have rolled back, or the error states
                which engine serves which version.
        """
        answers = self._answers("weighbridge_apply", str(version), self.draft)
        if _has_several(answers):  # updates of two agents may have reached them in different orders
            answers = self._answers("weighbridge_status")
        ranks = self._by_name(answers)
        if self._told:
            check_same_ranks(self._told, ranks)
        wanted = label_of(self._model, version, self.draft)
        has = {name: is_version(status.served, wanted) for name, status in ranks.items()}
        if not all(has[name] or is_version(status.waiting, wanted) for name, status in ranks.items()):
            found = ", ".join(f"{name} {status.served or 'no version'}" for name, status in ranks.items())
            raise FailedPrecondition(
                f"not all ranks serve {wanted}: {found}"
                if self.draft
                else f"not all ranks serve version {version}: {found}",
                fix="let only one agent update an engine",
            )
        if all(has.values()):
            served = next(iter(ranks.values())).served
            self.label(served if drafter_in(served) else label)

    def resume(self) -> None:
        """Resume the server."""
        self._api.call("/resume", {})

    def sleep(self, level: int) -> None:
        """Make the server release its GPU memory.

        With level 1 it keeps its weights in host memory; with level 2 it discards them.
        """
        self._api.call(f"/sleep?level={level}", {})

    def wake_up(self, *tags: str) -> None:
        """Make the server allocate memory again: for ``weights``, for its ``kv_cache``, or for both; it then
        resumes.
        """
        self._api.call("/wake_up" + "".join(f"{'&' if at else '?'}tags={tag}" for at, tag in enumerate(tags)), {})

    def label(self, label: str) -> None:
        """Set vLLM's ``weight_version``, of each engine. vLLM 0.24 does not have this label."""
        with contextlib.suppress(NoRoute):
            self._api.call("/update_weight_version", {"new_version": label})

    def _ask_workers(self, method: str, *arguments: str) -> Ranks:
        """Statuses of all workers of all engines.

        Raises:
            FailedPrecondition: a worker failed (the error states why), or not all workers responded.
        """
        return self._by_name(self._answers(method, *arguments))

    def _by_name(self, answers: Answers) -> Ranks:
        with understood(self.url + _WORKERS):
            return _statuses(answers, self._count_workers)

    def _answers(self, method: str, *arguments: str) -> Answers:
        said = self._api.call(_WORKERS, {"method": method, "args": arguments})
        with understood(self.url + _WORKERS):
            answers: Answers = said.get("results", [])
            check_done(answers)
        return answers

    def _count_workers(self) -> int | None:
        """Number of workers that vLLM started, in all engines; None if it does not report it."""
        with contextlib.suppress(NoRoute):
            said = self._api.call("/get_world_size")
            size = said.get("world_size") if isinstance(said, dict) else None
            return size if isinstance(size, int) else None
        return None


def _answer(api: EngineApi, tokens: Sequence[int]) -> Answer:
    """Answer of one engine.

    The request that uses the prefix cache comes first, because the other request would refill the cache.
    """
    last, whole = (api.call(_COMPLETIONS, body) for body in (vllm_last(tokens), vllm_whole(tokens)))
    with understood(api.url + _COMPLETIONS):
        return Answer(read_vllm_whole(whole, tokens), read_vllm_last(last))


def _answer_token(api: EngineApi) -> None:
    """Make one engine generate one token."""
    said = api.call(_COMPLETIONS, vllm_token())
    with understood(api.url + _COMPLETIONS):
        check_vllm_token(said)


def check_done(answers: Answers) -> None:
    """Raise the failures that workers report.

    Raises:
        FailedPrecondition: a worker failed; names the engine if there are several.
    """
    several = _has_several(answers)
    said = {
        f"engine {each.get('engine', 0)}: {each['failed']}" if several else each["failed"]: None
        for each in answers
        if each["failed"]
    }
    problems = list(said)
    if problems:
        raise FailedPrecondition(problems[0], details=problems[1:])


def _statuses(answers: Answers, count_workers: Callable[[], int | None]) -> dict[str, Status]:
    """The workers' statuses, by the worker's name in errors, if all have responded.

    Args:
        answers: responses of a server.
        count_workers: returns the number of workers that the server reports, if any. Called if the responses do not
            contain the number of engines.

    Raises:
        FailedPrecondition: workers are missing, or some belong to a group with workers that this server does not reach;
            states what to do.
    """
    expected = _expected(answers) or count_workers()
    places = [(int(each.get("engine", 0)), int(each.get("rank", at))) for at, each in enumerate(answers)]
    if not answers or expected != len(answers) or len(set(places)) != len(places):
        raise FailedPrecondition(
            (
                f"{len(answers)} of {expected or 'an unknown number of'} workers of this server "
                "have responded, so the others may serve a different version"
            ),
            fix="install this release of weighbridge where vLLM's API server runs, too "
            "(VLLM_PLUGINS must not leave it out, VLLM_USE_RUST_FRONTEND "
            "must not replace it), and restart it; or start one server for each engine, each with its own agent",
        )
    group = max(int(each.get("group", 0)) for each in answers)
    if group > len(answers):
        raise FailedPrecondition(
            (
                f"this server has {len(answers)} of {group} workers that take a version together, "
                "and the others are behind other servers"
            ),
            fix=(
                "start vLLM with one server for all engines: without --data-parallel-external-lb, "
                "--data-parallel-hybrid-lb and --data-parallel-rank"
            ),
        )
    several = _has_several(answers)
    return {
        f"engine {engine}, rank {rank}" if several else f"rank {rank}": Status.from_json(each)
        for (engine, rank), each in zip(places, answers, strict=True)
    }


def _has_several(answers: Answers) -> bool:
    """Test whether they come from a server with several engines."""
    return any(int(each.get("engines", 1)) > 1 for each in answers)


def _expected(answers: Answers) -> int:
    """Number of workers according to the responses; 0 if they do not contain it."""
    first = answers[0] if answers else {}
    return int(first.get("engines", 0)) * int(first.get("ranks", 0))
