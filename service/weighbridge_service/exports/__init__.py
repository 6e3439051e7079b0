"""Exports: versions written in the background as Hugging Face folders, within the folder for exports.

May import: `service`, and everything that `service` may import; `weighbridge_storage`, `weighbridge`.

- `jobs`: state, progress and execution of export jobs.
- `folders`: paths in the folder for exports, and partial folders.
- `tensors`: the tensors of a version, read ahead.
"""
