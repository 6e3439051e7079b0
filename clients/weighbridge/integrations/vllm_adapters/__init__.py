"""Adapters kept by weighbridge, served by vLLM: ``vllm serve --enable-lora --middleware weighbridge.integrations.vllm_adapters.middleware.Adapters``.

The middleware resolves the model that a request names to one version of an adapter before vLLM sees the request, and has every engine behind the API
server load it. vLLM's own hook, a resolver, cannot do this: it is not available with several API servers, numbers adapters in each of them apart, and
takes the name as the client wrote it for the key of its caches. In each engine a guard refuses requests whose adapter is not on the base version
that the engine has at that moment.
"""

# May import: `vllm`, `engine_rank` and folders below; vLLM where it runs in vLLM's processes.
#
# - `settings`: which adapters, from where, and what is kept. Pure.
# - `names`: what a request names, an adapter's number and place. Pure.
# - `serving`: whether an engine can serve an adapter, by its config, tensors and base. Pure.
# - `store`: folder of adapters on one host.
# - `middleware`: ASGI face, in each API server.
# - `admission`: adapters of one API server.
# - `guard`: what an engine's core refuses.
# - `workers`: what its workers do.
