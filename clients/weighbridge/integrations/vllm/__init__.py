"""Weighbridge inside vLLM, from 0.24 on: a load format and a weight-transfer engine, both called ``weighbridge``.

vLLM finds `register` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes. What does the work is
imported when vLLM asks for it by name: a vLLM that does not use weighbridge pays nothing for having it installed.
"""

# May import: `engine_rank`, `follow`, `_lazy`, `_clients` and folders below, and vLLM.
#
# - `loader`: load format; a worker starts from a version.
# - `startup`: config and tokenizer of a start.
# - `transfer`: weight-transfer engine.
# - `trainer`: its other end, in a trainer.
# - `colocated`: a trainer on the engine's card, which takes turns with it.
# - `worker`: what an agent asks workers over HTTP.
# - `engines`: several engines behind one server.
# - `model`: a rank's model, to the contract.
# - `layers`: its layers, in the format of checkpoints and of kernels.
# - `applying`: an update applied to layers with repacked weights.
# - `ahead`: layers processed in the staging place, before an update is applied.
# - `shadows`: copies of layers in which that is done.
# - `watching`: what processing is seen to do.
# - `kept_results`: places outside an engine where results of old weights stay.
# - `settings`: where weights come from.
# - `sleeping`: what the engine's core does when it sleeps and wakes up.
# - `wrapped`: layers that are wrapped for LoRA.
# - `releases`: what vLLM's releases call it.

from __future__ import annotations

import logging
import os
import sys

from weighbridge.integrations.vllm_adapters.settings import VARIABLE

NAME = "weighbridge"
"""Name of the load format, and of the weight-transfer backend."""


def register() -> None:
    """Make the load format and the transfer engine known to vLLM. Calling it again changes nothing.

    A vLLM that has other names than the known releases is left as it is, and the log says so: an error would end it, even where
    weighbridge is not used.
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
            "weighbridge does not work in vLLM %s, which goes on without it: %s", release, error
        )


def _serve_adapters() -> None:
    """Have this process serve adapters, if its environment names any. After all else: what guards an engine's adapters sees each call that brings a version."""
    if not os.environ.get(VARIABLE):
        return
    from weighbridge.integrations.vllm_adapters import guard, workers

    workers.install()
    core = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    if core is not None:  # other processes have none
        guard.install(core)
