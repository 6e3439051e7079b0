"""Client of a trainer rank: pushes of shards and training states, restores, folders.

May import: `_clients` and all private folders below it.

- `trainer`: the client. What follows are its parts, which do not know it.
- `pushes`: what every way to push goes through.
- `restorer`: restores; `restoring`: the run of one.
- `adapters`: pushes and restores of adapters.
- `known_tensors`: tensors of models, which are asked for once.
- `model_folders`: what a folder of Hugging Face registers, and what is pushed of it.
- `peft_adapters`: adapters of peft, in folders and of models that are trained.
- `megatron_adapters`: adapters of Megatron-core models by the names that peft's files have.
- `adapter_restores`: whether a version of an adapter fits a model, and shards of it that several layers share.
- `copies_until_step`: copies of a push that are made while training goes on, until the optimizer's step.
- `training`: training states beside weights: pushed with them, and restored.
- `training_files`: training states as checkpoints on disk.
- `states`: a trainer's state besides its weights, as values and files.
- `torch_dist`: checkpoints of Megatron-core and torch, as layouts of their files.
- `checkpoint_manager`: saves and restores of a training loop of one's own.
"""
