"""Terms of a push: for how long may it hold the loop that makes it, and do all of its ranks push?

May import: `_core`, torch's store of a process group, and `errors`.

- `policy`: what a push may cost, and what becomes of one that fails; the hold of one call.
- `agreement`: all ranks of a push make it, or none.
"""
