"""Training states in checkpoints on disk, of torch and of Megatron-core.

May import: what `_trainers.states` may, and `_trainers.states` itself.

- `checkpoint_values`: values that are no tensors of a training state, as checkpoints have them, and back.
- `checkpoint_folder`: a checkpoint as a training state.
- `checkpoint_step`: the step that a folder of weights is of.
- `restorable`: which checkpoints a training state can be restored from.
"""
