"""Commands that show people what happens: differences between versions, and what a shell offers while a command is typed.

May import: as `weighbridge._cli`.

- `comparing`: diff.
- `completing`: completion.
"""
