"""Names in a checkpoint, of files and of parameters: which belong to the model, and what wrappers have added.

May import: `_core`, `weighbridge.errors`.

- `weight_files`: files of a folder that hold the weights of its model.
- `parameter_names`: names of parameters without those of wrappers; those of adapters.
"""
