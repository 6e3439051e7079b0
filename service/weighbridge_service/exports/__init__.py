"""Exports: versions written in the background as Hugging Face folders, within the folder for exports.

May import: `service`, and what that may; `weighbridge_storage`, `weighbridge`.

- `jobs`: export jobs: their state, progress and execution.
- `folders`: paths in the folder for exports, and partial folders.
- `tensors`: the tensors of a version, read ahead.
"""
