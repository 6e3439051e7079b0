"""Exports: versions written as Hugging Face folders in the folder of exports, in the background.

May import: `service`, and what that may; `weighbridge_storage`, `weighbridge`.

- `jobs`: what was asked for, how far it is, and its execution.
- `folders`: paths in the folder of exports, and folders that are being written.
- `tensors`: the tensors of a version, read ahead.
"""
