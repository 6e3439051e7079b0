"""The Hub endpoint over a running service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.api.http.hub.endpoint import MODEL, Endpoint, Recorder
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer


@pytest.fixture(scope="package")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        with TrainerClient(running.address) as trainer:
            for seed in (1, 2):
                folder = tmp_path_factory.mktemp("hf")
                tiny_model(tiny_config("llama", tied=False), seed).save_pretrained(folder)
                (folder / "README.md").write_text("# A model card, é\n")
                if seed == 1:
                    trainer.register_model(MODEL, folder)
                trainer.push_folder(MODEL, folder, step=seed).wait(timeout=60)
            trainer.set_ref(MODEL, "prod", 1)
        exports = Exports(running.service)
        recorder = Recorder(create_app(running.service, exports, running.metrics, running.health))
        server = HttpServer("127.0.0.1:0", 1024)
        server.start(recorder)
        found = Endpoint(running, f"http://{server.address}", recorder)
        yield found
        found.http.close()
        server.stop()
        exports.close()
