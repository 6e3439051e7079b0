"""Commands that display information: differences between versions, a service's activity, and shell completion.

May import: as `weighbridge._cli`.

- `comparing`: diff.
- `proving`: prove.
- `golden`: golden.
- `engine_adapters`: adapters.
- `top`: top.
- `gathering`: readings of a service for it.
- `overview`: overview derived from readings.
- `screen`: drawing of an overview.
- `completing`: completion.
"""
