"""Registered models: tensors, weight maps, and layouts of ranks.

May import: `families`, `plan`, `weighbridge_storage`, `weighbridge`.

- `registered_model`: a model, and what is derived from it once.
- `registration`: what is checked and derived from its files, and what heads keep of it.
- `model_tensors`: its tensors and their dtypes.
- `listed_tensors`: its tensors as a list, where its model type has no weight map.
- `adapters`: what is checked of an adapter of peft.
- `bridges`: its tensors on both sides, as its family says.
- `bridge_process`: a process of its own that makes them, so that the service imports no torch.
- `library_models`: comparison of a model's tensors with transformers' own model of its config.
- `tracing`: which element goes where, found by sending numbered elements through a conversion.
- `weight_maps`: the weight map of the tensors that a trainer declares.
- `megatron_layouts`: shards of a Megatron-core rank.
- `engine_layouts`: slices of an engine rank.
- `engine_cuts`: the cut of one tensor; `engine_facts`: what the cuts need to know of a model.
"""
