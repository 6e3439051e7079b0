"""Agent beside a running engine, ``weighbridge follow``: keeps it on a ref.

May import: `integrations`, `_clients` and folders below.

- `agent`: what is done when the ref moves.
- `engines`: what an engine must be able to do.
- `vllm`: vLLM over HTTP.
- `sglang`: SGLang over HTTP.
"""
