"""Training states: what a trainer needs besides its weights to go on from where it was.

May import: what `_formats` may, and `_formats` itself.

- `training_state`: the values that ranks push and are filled from, whatever their trainer.
- `boxed_tensors`: tensors with the boxes of them that a rank holds.
- `blobs`: the values of a rank that are no tensors with boxes, as bytes.
- `stateful`: the mappings of values that a trainer gives and gets back.
- `random_states`: the random number generators of this process.
- `torch_optimizers`: the state of torch optimizers by the names of their parameters, and back.
- `torch_training`: torch modules and their optimizers.
"""
