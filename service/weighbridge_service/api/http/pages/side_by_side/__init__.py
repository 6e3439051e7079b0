"""Versions side by side on pages: what is kept with them as columns and over steps, and two of them compared.

May import: `words` of the pages, and what that may.

- `contents`: what lies in a version.
- `metadata_columns`: metadata of several versions as columns of a table.
- `metadata_plots`: numbers of it over steps, as pictures.
- `compare_view`: two versions and what differs.

All of it is pure.
"""
