"""Versions side by side on pages: metadata of several versions as columns and as plots, and two versions compared.

May import: `words` of the pages, and what that may.

- `contents`: files, tensors and provenance of a version.
- `metadata_columns`: metadata of several versions as columns of a table.
- `metadata_plots`: numbers in metadata over steps, as pictures.
- `compare_view`: the differences between two versions.

All modules are pure.
"""
