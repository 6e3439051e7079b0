"""Is an engine refused that would go on with what old weights have computed, and no other?

The names are those of vLLM 0.32: of settings in ``vllm/config``, of connectors in ``kv_connector/factory.py``. Which of
these connectors have a ``reset_cache`` was looked up in its source; the others leave what they keep when a pause
empties the engine's caches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.vllm.engines import WorkersCall, changes_parameters
from weighbridge.integrations.vllm.kept_results import check_updatable


def engine(connector: str | None = None, *inner: str, encoders: str | None = None) -> Any:
    """The configuration of an engine with these connectors of KV blocks and of encoders' results."""
    connectors = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in inner]}
    return SimpleNamespace(
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config=connectors),
        ec_transfer_config=encoders and SimpleNamespace(ec_connector=encoders),
    )


@pytest.mark.parametrize(
    "configuration",
    [
        SimpleNamespace(),
        engine(),
        engine("NixlConnector"),  # brings blocks of one request
        engine("OffloadingConnector"),
        engine("MultiConnector", "NixlConnector", "MooncakeStoreConnector"),
    ],
)
def test_engines_whose_caches_a_pause_empties_take_updates(configuration: Any) -> None:
    check_updatable(configuration)


@pytest.mark.parametrize(
    ("configuration", "named"),
    [
        (engine("LMCacheConnectorV1"), "LMCacheConnectorV1 of --kv-transfer-config"),
        (engine("MultiConnector", "NixlConnector", "FlexKVConnectorV1"), "FlexKVConnectorV1"),
        (engine(encoders="ECExampleConnector"), "--ec-transfer-config"),
    ],
)
def test_engines_that_keep_results_where_a_pause_leaves_them_refuse_updates(configuration: Any, named: str) -> None:
    with pytest.raises(FailedPrecondition, match=named) as refused:
        check_updatable(configuration)
    assert "start the engine again from the new version" in refused.value.fix


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (WorkersCall("weighbridge_apply", args=("17",)), True),
        (WorkersCall("weighbridge_undo", args=("17",)), True),
        (WorkersCall("weighbridge_stage", args=("17",)), False),
        (WorkersCall("weighbridge_status"), False),
        (WorkersCall("start_weight_update"), False),
        (WorkersCall(lambda worker: worker), False),
        (WorkersCall("update_weights", kwargs={"update_info": {"version": 17}}), True),
        (WorkersCall("update_weights", args=({"version": 17, "phase": "undo"},)), True),
        (WorkersCall("update_weights", kwargs={"update_info": {"version": 17, "phase": "prepare"}}), False),
        (WorkersCall("update_weights", args=({"version": 17, "phase": "stage"},)), False),
        (WorkersCall("update_weights", kwargs={"update_info": [{"version": 17}, {"version": 17}]}), True),
        (WorkersCall("update_weights"), True),  # whatever it does
    ],
)
def test_caches_are_emptied_after_calls_that_bring_a_version_and_no_others(call: WorkersCall, changes: bool) -> None:
    assert changes_parameters(call) is changes
