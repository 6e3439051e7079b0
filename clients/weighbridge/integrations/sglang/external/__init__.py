"""Package for SGLang 0.5.10, which has no plug-ins:
``SGLANG_EXTERNAL_MODEL_PACKAGE=weighbridge.integrations.sglang.external``.

SGLang imports this package in each process that has a model, to look for models in it. The package contains none; its
import installs the hooks of updates. A start from ``weighbridge://`` would require an earlier hook.
"""

# May import: the package around it.

from __future__ import annotations

from weighbridge.integrations.sglang import plugin, releases

if not releases.has_registry():
    releases.wrap(plugin.hooks_of_updates())
