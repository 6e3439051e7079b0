"""Operations of the control API, as data.

May import: the rest of `_core`, `weighbridge.errors`.

- `verbs`: permissions that a caller needs.
- `operation`: one call of the contract.
- `table`: all calls.
"""
