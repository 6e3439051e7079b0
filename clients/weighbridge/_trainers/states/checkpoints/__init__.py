"""Training states in checkpoints on disk, of torch and of Megatron-core.

May import: everything that `_trainers.states` may import, and `_trainers.states` itself.

- `checkpoint_values`: conversion between the non-tensor values of a training state and those of a checkpoint.
- `checkpoint_folder`: reading a checkpoint as a training state.
- `checkpoint_step`: the training step of a folder of weights.
- `restorable`: checks that a training state can be restored from a checkpoint.
"""
