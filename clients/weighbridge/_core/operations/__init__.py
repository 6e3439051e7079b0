"""Operations of the control API, as data.

May import: the rest of `_core`, `weighbridge.errors`.

- `verbs`: what a caller must be allowed to do.
- `operation`: one call of the contract.
- `table`: all of them.
"""
