"""Agent for a running engine, ``weighbridge follow``: keeps the engine on the version that a ref names."""

# May import: `_lazy`, `_clients` and folders below, and no engine: adapters inside engines and trainers import it.
# - `agent`: reacts when the ref moves.
# - `reaching`: checks whether the engine is reachable.
# - `news`: moves of a ref, with checks of the engine between them.
# - `updates`: one update of running engines.
# - `engines`: interface of an engine.
# - `status`: status of each of its ranks.
# - `evidence`: digests of its parameters.
# - `proving`: the proof that they contain a version; `due_proofs`: when an agent makes one.
# - `golden`: its drift from a version's golden prompts.
# - `completions`: requests for one token, and for the log probabilities of given ones.
# - `answers`: calls to an engine's HTTP API, and its responses.
# - `status_file`: a file with the engine's status.
# - `wanted`: the version that a request to SGLang names.
# - `adapters`: adapters of an engine's model, and which of them are preloaded.
# - `vllm`: vLLM over HTTP; `vllm_adapters`: adapters in it.
# - `sglang`: SGLang over HTTP; `sglang_adapters`: adapters in it.
