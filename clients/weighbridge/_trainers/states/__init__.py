"""Training states: everything that a trainer needs, in addition to its weights, to resume.

May import: `_formats` and everything that it may import; `_trainers.torch_dist`.

- `training_state`: the values that ranks of any trainer push and are restored from.
- `boxed_tensors`: tensors with the boxes that a rank holds of them.
- `blobs`: all other values of a rank, as bytes.
- `plain_values`: conversion of a trainer's values to the types that blobs accept.
- `checkpoints`: training states in checkpoints on disk.
- `megatron_common`: the common state of Megatron-core's checkpoints.
- `torch_entries`: the entries of torch's checkpoints that are not tensors.
- `stateful`: the mappings of values that a trainer pushes and restores.
- `random_states`: the random number generators of this process.
- `torch_optimizers`: the state of torch optimizers by the names of their parameters, and back.
- `zero_optimizers`: the same for DeepSpeed's ZeRO optimizers.
- `steady`: memory that only the optimizer's next step changes.
- `torch_training`: torch modules and their optimizers.
- `megatron_training`: training states of Megatron-core ranks.
- `megatron_chunks`: model chunks of a Megatron-core rank, with or without wrappers.
- `megatron_optimizer`: elementwise state of Megatron-core's optimizers.
- `megatron_values`: other values of Megatron-core's optimizers.
- `megatron_pieces`: places of the elements of Megatron-core's parameters in the tensors of checkpoints.
"""
