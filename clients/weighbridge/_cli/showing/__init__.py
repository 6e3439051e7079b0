"""What people are shown of what happens: differences between versions.

May import: as `weighbridge._cli`.

- `comparing`: diff.
"""
