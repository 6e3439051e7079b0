"""Text for users in tables, messages and errors. The functions do no I/O.

May import: `weighbridge.errors`.

- `sizes`: sizes and rates.
- `counts`: counts and percentages.
- `durations`: durations and ages.
- `waits`: ranks that a call waits for, and reminders.
- `shortening`: shortening of long text.
- `plain`: untrusted text, made safe for a terminal.
- `suggestions`: suggestion of the name that the user probably meant.
- `extras`: the package to install if an optional dependency is missing.
"""
