"""Adapters stored in weighbridge, served by vLLM: ``vllm serve --enable-lora --middleware
weighbridge.integrations.vllm_adapters.middleware.Adapters``.

The middleware resolves the model that a request names to one version of an adapter before vLLM sees the request, and
makes every engine behind the API server load it. vLLM's own hook, a resolver, cannot do this: it is not available with
several API servers, each server would number adapters independently, and its caches are keyed by the name as the client
wrote it. In each engine, a guard refuses a request if the base of its adapter is not the version that the engine has at
that moment.
"""

# May import: `vllm`, `engine_rank` and folders below; vLLM where it runs in vLLM's processes.
# - `settings`: which adapters are served, where they come from, and how many are cached. Pure.
# - `names`: adapter names in requests, an adapter's number and folder. Pure.
# - `serving`: whether an engine can serve an adapter, by its config, tensors and base. Pure.
# - `store`: folder of adapters on one host.
# - `middleware`: ASGI middleware, in each API server.
# - `admission`: adapters of one API server.
# - `guard`: refusals in an engine's core.
# - `workers`: the part that runs in the engine's workers.
