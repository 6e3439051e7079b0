"""Demonstration: real trainers and engines small enough for a laptop, ``weighbridge demo``.

May import: the public surface of `weighbridge`; `weighbridge_storage.opening` to show what lies in the store.

- `run`: options, and the choice of a story.
- `story`: Megatron ranks push, engines pull, a trainer resumes.
- `vllm_story`: the same with vLLM servers.
- `ranks`: processes with gloo.
- `imports_begin`, `imports_done`: what the server that they are forked from imports first and last.
- `trainer_ranks`: what a trainer rank does.
- `megatron_cpu`: Megatron-core on CPUs.
- `hf_from_megatron`: Megatron's tensors by hand, as an independent answer.
- `language_model`: the language model, from a wheel.
- `text`: what it is trained on.
- `tp_engine`: a tensor-parallel engine that generates.
- `vllm_server`: a vLLM server.
- `service_process`: the service as a process.
- `report`: the printed report.
- `keeping`: the service that is left for a look.
"""
