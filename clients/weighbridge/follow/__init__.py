"""Agent beside a running engine, ``weighbridge follow``: keeps it on a ref."""

# May import: `_lazy`, `_clients` and folders below, and no engine: adapters inside engines and trainers import it.
#
# - `agent`: what is done when the ref moves.
# - `reaching`: whether it can be reached.
# - `news`: moves of a ref, with looks at the engine between them.
# - `updates`: one update of running engines.
# - `engines`: what an engine must be able to do.
# - `status`: what each of its ranks says of itself.
# - `evidence`: what its parameters hold.
# - `proving`: the proof that they hold a version; `due_proofs`: when an agent makes one.
# - `golden`: its drift from a version's golden prompts.
# - `completions`: requests for one token, and for the log probabilities of given ones.
# - `answers`: calls of an engine's HTTP API, and what it answers.
# - `status_file`: how the engine stands, in a file.
# - `wanted`: the version that a request to SGLang names.
# - `adapters`: adapters beside an engine's model, and which are loaded ahead.
# - `vllm`: vLLM over HTTP; `vllm_adapters`: adapters in it.
# - `sglang`: SGLang over HTTP; `sglang_adapters`: adapters in it.
