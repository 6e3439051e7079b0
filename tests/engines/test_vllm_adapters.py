"""Does vLLM answer by the adapter's version that its answer names, on the base that this version names, while adapters
are pushed, refs move and the base is updated?

Every answer is compared, token for token, with transformers' of the model into which peft has merged exactly that
version. Servers of two engines with two API servers, and of two tensor-parallel ranks, in float32 with a cache of
prefixes; one in bfloat16, which is compared with the same adapter from a local path.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.gate import Gate
from tests.support.rounds import first_seed, rounds
from tests.support.vllm_adapters import (
    BASE,
    PROMPTS,
    Adapters,
    Refused,
    Said,
    adapted,
    ask,
    engine_of,
    keeping,
    serving,
)
from tests.support.vllm_environment import HAS_KERNELS, needs_vllm
from tests.support.word_models import LONG_PROMPT, PROMPT
from weighbridge.follow import vllm as vllm_driver
from weighbridge.follow.agent import Follower
from weighbridge_demo.vllm_server import VllmServer

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not HAS_KERNELS, reason="nothing is computed without kernels"),
    pytest.mark.slow,
    pytest.mark.timeout(14_400),
]

CLIENTS = rounds("SERVED_CLIENTS")
TAG = "prod"
START_SECONDS = 1500.0


@dataclass
class Names:
    """Versions of one adapter in the order in which they were pushed, and in which a tag named them: each first as one
    that is beginning to, then as one that does.
    """

    begun: dict[str, list[str]] = field(default_factory=dict)
    done: dict[str, list[str]] = field(default_factory=dict)

    def now(self, named: str) -> int:
        """Number of versions that a ref has named for certain."""
        return len(self.done.get(named, ()))

    def between(self, named: str, before: int) -> list[str]:
        """Versions that a ref may have named since it had named so many."""
        return self.begun.get(named, [])[max(0, before - 1) :]


@dataclass
class Client:
    """A client that asks for adapters by refs and by numbers, and notes what it got and what it may have got."""

    there: Adapters
    server: VllmServer
    names: Names
    chance: random.Random
    answers: list[tuple[str, list[str], Said | Refused, str]] = field(default_factory=list)

    def run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            named = self.chance.choice([*self.names.done])
            before = self.names.now(named)
            pinned = self.chance.random() < 0.3
            model = self.chance.choice(self.names.done[named]) if pinned else named
            stream = {"stream": True} if self.chance.random() < 0.5 else {}
            prompt = self.chance.choice([PROMPT, LONG_PROMPT])
            found = ask(self.server, model, prompt=prompt, **stream)
            may_be = [model] if pinned else self.names.between(named, before)
            self.answers.append((model, may_be, found, prompt))


@contextmanager
def asking(there: Adapters, server: VllmServer, names: Names) -> Iterator[list[Client]]:
    """Clients that ask meanwhile."""
    ended = threading.Event()
    clients = [Client(there, server, names, random.Random(first_seed() + number)) for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, args=[ended]) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        ended.set()
        for thread in threads:
            thread.join(300)


def push(there: Adapters, names: Names, name: str, seed: int, base: int, tagged: bool = True) -> str:
    """Push a version, and move the tag to it."""
    version = there.push(
        name, seed, base, before=lambda number: names.begun.setdefault(name, []).append(f"{name}@{number}")
    )
    names.done.setdefault(name, []).append(version)
    if tagged:
        by_tag = f"{name}@{TAG}"
        names.begun.setdefault(by_tag, []).append(version)
        there.client.set_ref(name, TAG, version.partition("@")[2])
        names.done.setdefault(by_tag, []).append(version)
    return version


def check(there: Adapters, clients: list[Client], other: str = "") -> int:
    """Compare all answers; how many named an adapter.

    Refusals have to name ``other``, if the base has changed meanwhile.
    """
    count, wrong = 0, list[Any]()
    for client in clients:
        for model, may_be, found, prompt in client.answers:
            if isinstance(found, Refused):
                right = found.status == 409 and bool(other)
                right &= f"this engine serves {other}" in found.text or "its engines serve" in found.text
            else:
                right = found.model in may_be and found.text == there.said[found.model, prompt]
                count += 1
            if not right:
                wrong.append((model, may_be, found, PROMPTS.index(prompt)))
    assert not wrong, f"{len(wrong)} of {sum(len(each.answers) for each in clients)}: {wrong[:9]}"
    return count


@pytest.mark.parametrize(
    ("arguments", "pause_mode"),
    [
        (("--data-parallel-size", "2", "--api-server-count", "2"), "wait"),
        (("--tensor-parallel-size", "2"), "keep"),
    ],
    ids=["engines", "ranks"],
)
def test_every_answer_is_that_of_the_merged_model_of_the_version_that_it_names(
    tmp_path: Path, arguments: tuple[str, ...], pause_mode: Any
) -> None:
    adapters, versions = rounds("SERVED_ADAPTERS"), rounds("SERVED_VERSIONS")
    with keeping(tmp_path) as there, serving(there, *arguments) as server:
        names = Names()
        for number in range(adapters):
            push(there, names, f"acme/a{number}", number, 1)
        server.wait_ready(START_SECONDS)
        engine = vllm_driver.VllmServer(server.url, BASE, there.running.address, pause_mode=pause_mode)
        assert engine.load_adapter(there.client, "acme/a0").way == "files"
        assert engine.load_adapter(there.client, "acme/a0", 1).way == ""
        assert engine.adapters() == ("acme/a0@1",)
        with asking(there, server, names) as clients:
            for version in range(1, versions):
                for number in range(adapters):
                    push(there, names, f"acme/a{number}", 1000 * version + number, 1)
            for number in range(adapters):  # the latest ones and the older ones, once more, for certain
                for model in (f"acme/a{number}", f"acme/a{number}@1"):
                    found = ask(server, model)
                    assert isinstance(found, Said), found
                    assert found.text == there.said[found.model, PROMPT]
        assert check(there, clients) > CLIENTS

        # the base is updated under requests
        second = there.push_base(2)
        engine.connect()
        with asking(there, server, names) as clients:
            done = Follower(there.client, BASE, engine).take_to(second)
            assert done.serves == second, done
            refused = ask(server, "acme/a0@1")
            newest = push(there, names, "acme/a0", 5, second)
            assert engine.load_adapter(there.client, "acme/a0").name == newest
            found = ask(server, "acme/a0")
        assert refused == Refused(409, refused.text)  # type: ignore[union-attr]
        assert f"acme/a0@1 is on {BASE}@1, and this engine serves {BASE}@{second}" in refused.text  # type: ignore[union-attr]
        assert isinstance(found, Said), found
        assert found.model == names.done["acme/a0"][-1]
        assert found.text == there.said[found.model, PROMPT]
        check(there, clients, other=f"{BASE}@{second}")
        # alone: vLLM 0.32's kernels for processors add an adapter to requests of the base that are in one batch with
        # others
        assert ask(server, BASE) == Said(BASE, there.said[f"{BASE}@{second}", PROMPT])


def test_an_adapter_says_the_same_as_from_a_local_path_and_what_cannot_be_served_is_said(
    tmp_path: Path,
) -> None:
    with keeping(tmp_path) as there:
        versions = [there.push(f"acme/b{number}", number) for number in range(6)]
        there.trainer.push_adapter(
            "acme/dora", adapted(there.bases[1], 5, use_dora=True), base=f"{BASE}@1", step=1
        ).wait("durable", timeout=120)
        there.push_base(2)
        there.push("acme/second", 9, base=2)
        there.client.export(versions[0], None, tmp_path / "local")
        with Gate(there.running.address) as gate, serving(
            there, "--dtype", "bfloat16", "--lora-modules", f"local={tmp_path / 'local'}",
            from_folder=there.bases[1], settings={"base": f"{BASE}@1"}, server=gate.address,
        ) as server:  # fmt: skip
            server.wait_ready(START_SECONDS)
            for prompt in (PROMPT, LONG_PROMPT, "w1 w2", "w7 w8 w9 w100"):
                local, kept = (ask(server, each, prompt=prompt, logprobs=1) for each in ("local", versions[0]))
                assert isinstance(local, Said), local
                assert isinstance(kept, Said), kept
                assert (kept.model, kept.text) == (versions[0], local.text)
                assert kept.logprobs == local.logprobs
            texts = {each: ask(server, each) for each in versions}
            assert len({found.text for found in texts.values()}) == len(versions)

            for name, status, said in (
                ("acme/nobody", 404, "acme/nobody"),
                (versions[0].partition("@")[0] + "@77", 404, "77"),
                ("acme/dora", 400, "DoRA"),
                ("acme/second", 409, f"acme/second@1 is on {BASE}@2, and this engine serves {BASE}@1"),
                ("elsewhere/alice", 404, "does not exist"),
            ):
                found = ask(server, name)
                assert isinstance(found, Refused), found
                assert found.status == status, found
                assert said in found.text

            # as on a host without an API server: the workers have dropped most, and find no folder
            shutil.rmtree(tmp_path / "cache" / "vllm-adapters")
            assert {each: ask(server, each) for each in versions} == texts

            gate.cut_after(0)
            known, unseen = ask(server, versions[-1]), ask(server, "acme/b5@latest")
            assert known == texts[versions[-1]]
            assert isinstance(unseen, Refused), unseen
            assert unseen.status == 503, unseen
            assert "cannot be reached" in unseen.text
            gate.open()
            assert ask(server, "acme/b5@latest") == texts[versions[-1]]

            engine = vllm_driver.VllmServer(server.url, BASE, there.running.address)
            assert versions[-1] in engine.adapters()
            engine.unload_adapter("acme/b5", 1)
            assert versions[-1] not in engine.adapters()
            assert ask(server, versions[-1]) == texts[versions[-1]]

            os.kill(engine_of(server), signal.SIGKILL)
            killed = ask(server, versions[0])
            assert isinstance(killed, Refused), "an answer without an engine"
        with serving(
            there, "--dtype", "bfloat16", from_folder=there.bases[1], settings={"base": f"{BASE}@1"},
            name="again",
        ) as server:  # fmt: skip
            server.wait_ready(START_SECONDS)
            assert {each: ask(server, each) for each in versions} == texts
