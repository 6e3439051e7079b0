"""Words for people: what is said in tables, messages and errors. Pure.

May import: nothing of this project.

- `sizes`: sizes as text.
- `counts`: numbers of things.
- `waits`: what is waited for.
- `shortening`: texts that are too long.
- `suggestions`: the name that was probably meant.
"""
