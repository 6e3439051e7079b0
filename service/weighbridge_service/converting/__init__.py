"""Conversion of folders: Hugging Face folders to torch_dist checkpoints of Megatron-core and back, and FSDP checkpoints
to Hugging Face folders. Only `pushing` requires a running service.

May import: `models`, `plan`, `weighbridge_storage`, `weighbridge`.

- `convert`: the entry point, `convert_folder`.
- `conversions`: the plan of a conversion.
- `checkpoint_model`: the model in a checkpoint with Megatron-core's names.
- `trained_model`: comparison of a config with the trainer's arguments in a checkpoint.
- `named_model`: the model in a checkpoint with Hugging Face's names.
- `checkpoint_keys`: keys and chunks of a checkpoint to write.
- `units`: the plan as units of work that can be done in any order.
- `working_folder`: state on disk with which the next run resumes an interrupted conversion.
- `pushing`: push of a checkpoint as a version of a model.
- `workers`: worker processes.
- `worker`: the code that runs in a worker process.
"""
