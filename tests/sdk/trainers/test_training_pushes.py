"""Do pushes of training states beside weights end when one rank fails, and does neither wait for the other's bytes?"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import (
    CheckpointManager,
    InvalidArgument,
    Layout,
    TrainerClient,
    VersionFailed,
)
from weighbridge._clients.copying.copies import CopiesInCall, Copying
from weighbridge._clients.push_handle import PushHandle
from weighbridge._formats.push_sources import CastingSource, HeldShards, StagingPool, StreamSource
from weighbridge._formats.tensor_stream import Ranges

MODEL = "acme/smol"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    (tmp_path / "config.json").write_text("{}")
    with running_service(tmp_path / "store") as running:
        with TrainerClient(running.address) as client:
            client.register_model(MODEL, tmp_path, tensors=module(), weight_map=False)
        yield running


def module() -> torch.nn.Linear:
    made = torch.nn.Linear(512, 512)
    torch.nn.init.ones_(made.weight)
    torch.nn.init.zeros_(made.bias)
    return made


class StallingProxy:
    """Forwards connections to a service; those by which a client has sent more than some calls take stand still until
    they are released.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._released = threading.Event()
        self._sockets: list[socket.socket] = []
        self.stalled = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._forward(self._listener.accept()[0])

    def _forward(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        self._sockets += [client, server]
        for source, sink, most in ((client, server, 256 << 10), (server, client, 1 << 60)):
            threading.Thread(target=self._pump, args=(source, sink, most), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                most -= len(data)
                if most < 0 and not self._released.is_set():
                    self.stalled.set()
                    self._released.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


class Broken(CastingSource):
    """Shards that cannot be copied, as when a GPU has failed."""

    def stage(self, ranges: Ranges) -> StreamSource:
        raise RuntimeError("the device is gone")


class BrokenCopies(CopiesInCall):
    """Copies of tensors that cannot be copied."""

    def shards(
        self, layout: Layout, tensors: Sequence[torch.Tensor], staging: StagingPool
    ) -> tuple[HeldShards, Copying]:
        return Broken(layout, tensors), Copying()


def pushed(client: TrainerClient, rank: int, step: int) -> PushHandle:
    return client.push_state_dict(
        MODEL, module(), step=step, rank=rank, world_size=2, state={"step": step}, request_id=f"r/{step}"
    )


def test_a_rank_whose_weights_fail_once_all_have_declared_is_not_waited_for_with_the_training_state(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank's weights are copied by then: without a notice it would wait ten minutes for this one."""
    with (
        TrainerClient(service.address) as first,
        TrainerClient(service.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        begun = time.monotonic()
        fine = pool.submit(pushed, first, 0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(second._pushes, "_copies", lambda *_: BrokenCopies())
            with pytest.raises(RuntimeError, match="the device is gone"):
                pushed(second, 1, 1)
        with pytest.raises(VersionFailed, match="the device is gone"):
            fine.result()
        assert time.monotonic() - begun < 100
        # the step after that is pushed by both
        handles = [pool.submit(pushed, client, rank, 2) for rank, client in enumerate((first, second))]
        for each in handles:
            handle = each.result()
            assert handle.training is not None
            handle.wait(timeout=60)
            handle.training.wait(timeout=60)


def test_a_rank_that_is_refused_before_it_opens_anything_is_not_waited_for_with_the_training_state(
    service: RunningService,
) -> None:
    """The other rank declares the same shards as in the previous push, so the push of its weights waits for no rank."""
    with (
        TrainerClient(service.address) as first,
        TrainerClient(service.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):

        def push(client: TrainerClient, rank: int, step: int, value: object) -> PushHandle:
            state = {"value": value}
            return client.push_state_dict(MODEL, module(), step=step, rank=rank, world_size=2, state=state)

        for each in [pool.submit(push, client, rank, 1, 1) for rank, client in enumerate((first, second))]:
            each.result().wait(timeout=60)
        begun = time.monotonic()
        fine = pool.submit(push, first, 0, 2, 1)
        states = partial(second.versions, f"{MODEL}:training", include_invisible=True)
        eventually(lambda: any(each.step == 2 for each in states()))
        with pytest.raises(InvalidArgument, match="a builtins"):
            push(second, 1, 2, object())
        with pytest.raises(VersionFailed, match="a builtins"):
            fine.result()
        assert time.monotonic() - begun < 100


def test_a_rank_that_has_no_memory_for_its_copies_is_not_waited_for(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call copies every pushed tensor that may change before the next step."""
    own = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    with (
        TrainerClient(service.address) as first,
        TrainerClient(service.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        first.register_model("acme/norms", tmp_path, tensors=own, weight_map=False)

        def push(client: TrainerClient, rank: int) -> PushHandle:
            made = deepcopy(own)
            optimizer = torch.optim.AdamW(made.parameters())
            return client.push_state_dict(
                "acme/norms",
                made,
                step=1,
                rank=rank,
                world_size=2,
                optimizer=optimizer,
                until="optimizer_step",
            )

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("the device is full")

        begun = time.monotonic()
        fine = pool.submit(push, first, 0)
        with monkeypatch.context() as patched:
            patched.setattr(second._pushes._steps, "until", full)
            with pytest.raises(torch.OutOfMemoryError):
                push(second, 1)
        with pytest.raises(VersionFailed, match="the device is full"):
            fine.result()
        assert time.monotonic() - begun < 100


def test_a_second_push_does_not_wait_until_the_first_ones_state_has_arrived(service: RunningService) -> None:
    """Two pushes of a client may be in flight, with two states beside them."""
    proxy = StallingProxy(service.address)
    own = module()
    optimizer = torch.optim.AdamW(own.parameters())
    with (
        contextlib.closing(proxy),
        TrainerClient(proxy.address, lane="grpc") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        push = partial(client.push_state_dict, MODEL, own, optimizer=optimizer)
        try:
            first = push(step=1)
            proxy.stalled.wait()
            second = pool.submit(push, step=2).result(timeout=100)
            assert not first.done
            assert first.training is not None
            assert not first.training.done
        finally:
            proxy.release()
        for handle in (first, second):
            assert handle.training is not None
            assert handle.wait(timeout=60).step == handle.training.wait(timeout=60).step


def test_a_save_that_fails_behind_the_loop_is_told_at_the_next_one(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = StallingProxy(service.address)
    own = module()
    with (
        contextlib.closing(proxy),
        TrainerClient(proxy.address, lane="grpc") as client,
        TrainerClient(service.address) as operator,
    ):
        checkpoints = CheckpointManager(client, MODEL, own, torch.optim.AdamW(own.parameters()))
        try:
            first = checkpoints.save(1)
            assert first.training is not None
            proxy.stalled.wait()
            operator.abort(first.training.model, first.training.number, "the disk is wanted for something else")
        finally:
            proxy.release()
        with pytest.raises(VersionFailed, match="the disk is wanted"):
            first.training.report(timeout=60)
        checkpoints.save(2)
        assert f"{first.training.model}@{first.training.number} was not saved: " in caplog.text
        saved = checkpoints.wait(timeout=60)
        assert saved is not None
        assert saved.step == 2
        latest = checkpoints.latest()
        assert latest is not None
        assert latest.step == 2
        assert operator.version(MODEL, first.number).step == 1


def test_a_loop_that_is_restored_at_its_last_step_ends_without_a_save(service: RunningService) -> None:
    own = module()
    with TrainerClient(service.address) as client:
        begun = CheckpointManager(client, MODEL, own, torch.optim.AdamW(own.parameters()))
        begun.save(1)
        assert begun.wait(timeout=60) is not None
        again = CheckpointManager(client, MODEL, own, torch.optim.AdamW(own.parameters()))
        restored = again.restore()
        assert restored is not None
        assert restored.step == 1
        assert again.wait(timeout=60) is None


def test_what_a_restore_leaves_out_of_what_was_pushed_is_told_in_the_log(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    own = module()
    with TrainerClient(service.address) as client:
        values = {"scheduler": {"last_epoch": 7}}
        checkpoints = CheckpointManager(client, MODEL, own, state=values, rank_state={"loader": 3})
        checkpoints.save(1)
        checkpoints.wait(timeout=60)
        checkpoints.restore(rank_state=False)
        assert "leaves out" not in caplog.text
        CheckpointManager(client, MODEL, own, rank_state={}).restore()
        assert (
            f"{MODEL}:training@1 was pushed with scheduler in state=, loader in rank_state=, "
            "which this restore leaves out"
        ) in caplog.text
