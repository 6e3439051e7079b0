"""Words for people: what is said in tables, messages and errors. Pure.

May import: `weighbridge.errors`.

- `sizes`: sizes and rates.
- `counts`: numbers of things, and parts of a whole.
- `durations`: durations and ages.
- `waits`: what is waited for.
- `shortening`: texts that are too long.
- `plain`: texts of others, for a terminal.
- `suggestions`: the name that was probably meant.
- `extras`: what to install where an optional dependency is missing.
"""
