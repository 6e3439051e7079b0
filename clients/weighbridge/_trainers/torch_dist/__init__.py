"""torch_dist checkpoints of Megatron-core, as layouts of their files.

May import: `_core`, `_formats`, `weighbridge.errors`.

- `folder`: reading checkpoint folders, and laying out new ones.
- `chunks`: division of tensors into chunks.
- `writing`: writing new checkpoints from a stream of their tensors.
- `whole_folders`: folders that appear when they are complete.
- `metadata`: the files ``.metadata``, ``metadata.json`` and ``common.pt``.
- `noted_values`: values that trainers have stored in addition to tensors, such as their arguments.
- `rank_files`: FSDP checkpoints with a file for each rank; `optimizer_rank_files`: the files of their optimizer.
- `items`: tensors in the files of a checkpoint.
- `archives`: the archives that `torch.save` writes.
- `names`: names that pickles may contain.
- `pickles`: reading pickles as data, without executing them.
"""
