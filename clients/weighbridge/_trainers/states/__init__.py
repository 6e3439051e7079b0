"""Training states: what a trainer needs besides its weights to go on from where it was.

May import: `_formats` and what it may; `_trainers.torch_dist`.

- `training_state`: the values that ranks push and are filled from, whatever their trainer.
- `boxed_tensors`: tensors with the boxes of them that a rank holds.
- `blobs`: the values of a rank that are no tensors with boxes, as bytes.
- `plain_values`: values of a trainer as blobs take them.
- `checkpoints`: training states in checkpoints on disk.
- `megatron_common`: the common state of Megatron-core's checkpoints.
- `torch_entries`: the entries of torch's checkpoints that are no tensors.
- `stateful`: the mappings of values that a trainer gives and gets back.
- `random_states`: the random number generators of this process.
- `torch_optimizers`: the state of torch optimizers by the names of their parameters, and back.
- `zero_optimizers`: the same of DeepSpeed's ZeRO optimizers.
- `steady`: what nothing changes but the optimizer's next step.
- `torch_training`: torch modules and their optimizers.
- `megatron_training`: training states of Megatron-core ranks.
- `megatron_chunks`: model chunks of a Megatron-core rank, as trainers wrap them.
- `megatron_optimizer`: the state that Megatron-core's optimizers keep of elements.
- `megatron_values`: what they keep besides.
- `megatron_pieces`: where elements of its parameters lie in the tensors of checkpoints.
"""
