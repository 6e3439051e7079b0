"""Words for people in tables, messages and errors. Pure.

May import: `weighbridge.errors`.

- `sizes`: sizes and rates.
- `counts`: numbers of things, and parts of a whole.
- `durations`: durations and ages.
- `waits`: ranks that a call waits for, and reminders.
- `shortening`: texts that are too long.
- `plain`: untrusted texts, for a terminal.
- `suggestions`: the name that was probably meant.
- `extras`: the package to install if an optional dependency is missing.
"""
