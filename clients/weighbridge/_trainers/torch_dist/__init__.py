"""torch_dist checkpoints of Megatron-core, as layouts of their files.

May import: `_core`, `_formats`, `weighbridge.errors`.

- `folder`: reading such folders, and laying out new ones.
- `chunks`: how tensors are cut into chunks.
- `writing`: new ones, from a stream of their tensors.
- `whole_folders`: folders that appear when they are complete.
- `metadata`: their ``.metadata``, ``metadata.json`` and ``common.pt``.
- `noted_values`: values that trainers have noted beside tensors, such as their arguments.
- `rank_files`: checkpoints of FSDP, a file for each rank; `optimizer_rank_files`: those of its optimizer.
- `items`: tensors in them.
- `archives`: the archives that `torch.save` writes.
- `names`: what pickles may name.
- `pickles`: pickles read as data, without running them.
"""
