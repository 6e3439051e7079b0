"""Conversion of folders: Hugging Face folders to torch_dist checkpoints of Megatron-core, and back; checkpoints of FSDP to Hugging Face folders.
No service need run, but for `pushing`.

May import: `models`, `plan`, `weighbridge_storage`, `weighbridge`.

- `convert`: the whole of it, `convert_folder`.
- `conversions`: which bytes of which file go where, and what is left out.
- `checkpoint_model`: which model a checkpoint of Megatron-core holds.
- `trained_model`: whether a config is of the model that a checkpoint's trainer has noted.
- `named_model`: which one a checkpoint holds whose parameters have Hugging Face's names.
- `checkpoint_keys`: which keys and chunks a checkpoint is given.
- `units`: the plan as pieces of work that can be done in any order.
- `working_folder`: what an interrupted conversion leaves, so that the next run goes on.
- `pushing`: a checkpoint as a version of a model.
- `workers`: processes that do the work.
- `worker`: what runs in them.
"""
