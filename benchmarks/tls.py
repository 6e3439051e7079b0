"""``python -m benchmarks.tls``: what TLS and tokens add to a push and a pull over gRPC, next to the same without them
in one run.

Three services on loopback hold one model of random bf16 weights each: plain, with TLS, and with TLS and a policy that
knows the client by its token. Every round pushes and pulls all of it at each, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import trustme

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL
from weighbridge import Credentials, EngineClient, TrainerClient, VersionState
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge_service.access import tokens

_PLAIN, _TLS, _TOKENS = "plain", "TLS", "TLS and a token"


class Place:
    """A service, and a client of each kind for it.

    Args:
        address: address of the service.
        credentials: credentials of the clients.
        layout: the model's whole tensors.
        held: tensors to push.
        lane: lane of the weights.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        layout: Layout,
        held: Sequence[torch.Tensor],
        *,
        lane: str = "grpc",
    ) -> None:
        self._layout = layout
        self._held = held
        self._tensors = [torch.ones(shape, dtype=dtype) for dtype, shape in models.shapes_of(layout)]
        self.trainer = TrainerClient(address, lane=lane, credentials=credentials)
        self.engine = EngineClient(address, lane=lane, credentials=credentials)

    def push(self, step: int) -> float:
        """Seconds until all bytes of a version are there."""
        shards = TensorSource(StagingPool(), self._layout, self._held)
        started = time.perf_counter()
        handle = self.trainer.push_shards(
            MODEL, self._layout, TensorSpace.HUGGING_FACE, shards, step=step, rank=0, world_size=1
        )
        handle.wait(timeout=600, until=VersionState.READY)
        seconds = time.perf_counter() - started
        handle.wait(timeout=600)
        return seconds

    def pull(self) -> float:
        """Seconds of a pull into tensors that are there."""
        pull = self.engine.pull(MODEL)
        started = time.perf_counter()
        for _ in pull.filled(self._tensors.__getitem__):
            pass
        return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.tls", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default 7)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        specs = models.hugging_face_specs(models.write_config(models.config_of(args.gb), folder / "hf"))
        layout = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
        held = models.RandomBits(p.nbytes for p in layout.placements).of_layout(layout)
        options, ca, token = _secured(folder)
        shown = {
            _PLAIN: ((), Credentials()),
            _TLS: (options[:4], Credentials(ca=ca)),
            _TOKENS: (options, Credentials(ca=ca, token=token)),
        }
        places: dict[str, Place] = {}
        for name, (chosen, credentials) in shown.items():
            where = folder / name.replace(" ", "-")
            where.mkdir()
            service = stack.enter_context(processes.service(where, layout.nbytes, *chosen))
            place = places[name] = Place(service.grpc, credentials, layout, held)
            stack.callback(place.trainer.close)
            stack.callback(place.engine.close)
            place.trainer.register_model(MODEL, folder / "hf")
        pushes: dict[str, list[float]] = {name: [] for name in places}
        pulls: dict[str, list[float]] = {name: [] for name in places}
        for number in range(args.rounds + 1):
            for name, place in places.items():
                pushed, pulled = place.push(number), place.pull()
                if number:
                    pushes[name].append(pushed)
                    pulls[name].append(pulled)
    print(f"{layout.nbytes / 1e9:.2f} GB, {args.rounds} rounds, medians; ratios to plain by rounds")
    rows = [_row(name, pushes, pulls) for name in pushes]
    print(report.table(["", "push s", "/plain", "pull s", "/plain"], rows))
    if args.json is not None:
        report.write_json(args.json, bytes=layout.nbytes, pushes=pushes, pulls=pulls)


def _secured(folder: Path) -> tuple[tuple[str, ...], str, str]:
    """Options of a service with TLS and a policy, the file of its authority, and a token that it knows."""
    authority, token = trustme.CA(), tokens.new_token()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key, ca, policy = (folder / name for name in ("cert.pem", "key.pem", "ca.pem", "policy.toml"))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(ca))
    policy.write_text(f'[[identity]]\nname = "bench"\nmay = ["push", "pull"]\ntokens = ["{tokens.digest(token)}"]\n')
    options = ("--tls-cert", str(certificate), "--tls-key", str(key), "--policy", str(policy))
    return options, str(ca), token


def _row(name: str, pushes: dict[str, list[float]], pulls: dict[str, list[float]]) -> list[str]:
    cells = [name]
    for seconds in (pushes, pulls):
        ratios = [ours / plain for ours, plain in zip(seconds[name], seconds[_PLAIN], strict=True)]
        cells += [f"{statistics.median(seconds[name]):.3f}", f"{statistics.median(ratios):.2f}"]
    return cells


if __name__ == "__main__":
    main()
