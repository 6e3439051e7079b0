"""The Hub endpoint over a running service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.api.http.hub.endpoint import MODEL, Endpoint, endpoint_of
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge_service.api.http.hub_routes import HubSizes


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
        with endpoint_of(running) as found:
            yield found


@pytest.fixture(scope="package")
def small_pieces(endpoint: Endpoint) -> Iterator[Endpoint]:
    """The same service, with files and lists in many pieces."""
    with endpoint_of(endpoint.running, HubSizes(tree_page=2, read=50_000, send=9_999)) as found:
        yield found
