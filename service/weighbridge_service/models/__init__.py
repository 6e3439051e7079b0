"""Registered models: tensors, weight maps, and layouts of ranks.

May import: `families`, `plan`, `weighbridge_storage`, `weighbridge`.

- `registered_model`: a model, and the plans and layouts that are derived from it once.
- `registration`: checks of a model's files, and the registration that heads store.
- `model_tensors`: its tensors and their dtypes.
- `listed_tensors`: its tensors as a list, if no weight map exists for its model type.
- `adapters`: checks of a peft adapter.
- `bridges`: its tensors on both sides, as its family defines them.
- `bridge_process`: a separate process that makes bridges, so that the service does not import torch.
- `library_models`: comparison of a model's tensors with transformers' own model of its config.
- `tracing`: the place of each element after a conversion, found by converting numbered elements.
- `weight_maps`: the weight map of the tensors that a trainer declares.
- `megatron_layouts`: shards of a Megatron-core rank.
- `engine_layouts`: slices of an engine rank.
- `engine_cuts`: the cut of one tensor; `engine_facts`: properties of a model that the cuts depend on.
"""
