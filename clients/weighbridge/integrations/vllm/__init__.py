"""Weighbridge inside vLLM, from 0.24 on: a load format and a weight-transfer engine, both called ``weighbridge``.

vLLM finds `register` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes. The other
modules are imported when vLLM requests them by name, so that an installed but unused weighbridge costs nothing.
"""

# May import: `engine_rank`, `follow`, `_lazy`, `_clients` and folders below, and vLLM.
#
# - `loader`: load format; a worker starts from a version.
# - `startup`: config and tokenizer of a start.
# - `transfer`: weight-transfer engine.
# - `trainer`: the trainer's side of it.
# - `colocated`: a trainer that shares a GPU with the engine, in turns.
# - `worker`: methods of workers that an agent calls over HTTP.
# - `extensions`: those methods beside the ones of another package.
# - `engines`: several engines behind one server.
# - `model`: a rank's model, to the contract.
# - `layers`: its layers, in checkpoint format and kernel format.
# - `applying`: an update applied to layers with repacked weights.
# - `ahead`: layers processed in the staging place, before an update is applied.
# - `shadows`: copies of layers for that processing.
# - `watching`: observation of processing.
# - `kept_results`: places outside an engine where results of old weights persist.
# - `settings`: where weights come from.
# - `sleeping`: sleep and wake-up in the engine's core.
# - `wrapped`: layers that are wrapped for LoRA.
# - `releases`: names in different releases of vLLM.

from __future__ import annotations

import logging
import os
import sys

from weighbridge.integrations.vllm_adapters.settings import VARIABLE

NAME = "weighbridge"
"""Name of the load format, and of the weight-transfer backend."""


def register() -> None:
    """Register the load format and the transfer engine with vLLM. Calling it again changes nothing.

    If vLLM's names differ from those of the known releases, nothing is registered and a message is logged: an error
    would end vLLM, even if weighbridge is not used.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from weighbridge.integrations.vllm import startup

        if NAME not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                NAME, "weighbridge.integrations.vllm.transfer", "WeighbridgeTransferEngine"
            )
        startup.install()
        _serve_adapters()
    except (ImportError, AttributeError) as error:
        import vllm

        release = getattr(vllm, "__version__", "of an unknown release")
        logging.getLogger(f"vllm.plugins.{__name__}").warning(
            "weighbridge does not work in vLLM %s, which continues without it: %s", release, error
        )


def _serve_adapters() -> None:
    """Make this process serve adapters, if its environment names any.

    Must run last, so that the guard of an engine's adapters sees each call that loads a version.
    """
    if not os.environ.get(VARIABLE):
        return
    from weighbridge.integrations.vllm_adapters import guard, workers

    workers.install()
    core = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    if core is not None:  # other processes have no core
        guard.install(core)
