"""Package for SGLang 0.5.10, which has no plug-ins: ``SGLANG_EXTERNAL_MODEL_PACKAGE=weighbridge.integrations.sglang.external``.

SGLang imports the package so named in each process that has a model, to look for models in it. There are none: to import it is to install the
hooks of updates. A start from ``weighbridge://`` would need one sooner.
"""

# May import: the package around it.

from __future__ import annotations

from weighbridge.integrations.sglang import plugin, releases

if not releases.has_registry():
    releases.wrap(plugin.hooks_of_updates())
