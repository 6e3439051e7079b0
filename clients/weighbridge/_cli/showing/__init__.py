"""Commands that show people what happens: differences between versions, a service at work, and what a shell offers while a command is typed.

May import: as `weighbridge._cli`.

- `comparing`: diff.
- `proving`: prove.
- `golden`: golden.
- `engine_adapters`: adapters.
- `top`: top.
- `gathering`: what it reads of a service.
- `overview`: what that says.
- `screen`: how it is drawn.
- `completing`: completion.
"""
