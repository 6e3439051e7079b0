"""Client of a trainer rank: pushes of shards and training states, restores, and folders.

May import: `_clients` and all private folders below it.

- `trainer`: the client. The other modules are its parts and do not depend on it.
- `pushes`: the code that all methods that push share.
- `restorer`: restores; `restoring`: execution of a restore.
- `adapters`: pushes and restores of adapters.
- `known_tensors`: cache of the tensors of models.
- `model_folders`: registration and push of Hugging Face folders.
- `peft_adapters`: peft adapters, in folders and in models in training.
- `megatron_adapters`: adapters of Megatron-core models, by the names in peft's files.
- `adapter_restores`: checks that a version of an adapter fits a model, and the filling of shards that several layers
  share.
- `copies_until_step`: copies of a push that are made while training continues, until the optimizer's step.
- `training`: pushes and restores of training states together with weights.
- `training_files`: training states as checkpoints on disk.
- `states`: a trainer's state other than its weights, as values and files.
- `torch_dist`: checkpoints of Megatron-core and torch, as layouts of their files.
- `checkpoint_manager`: saves and restores of a custom training loop.
"""
