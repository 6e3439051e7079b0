"""State machine of one push: values and pure functions. No clock, no lock, no I/O.

May import: `catalog.holding`, `plan`, and the values and errors of `weighbridge_storage` and `weighbridge`; nothing else of `push`.

- `transitions`: an event in, the next state and effects out.
- `wanted`: which effects a state wants, and from when on.
- `ends`: how a push ends, and what leads to that.
- `state`: a push at one moment.
- `phases`: where a push can be, and which phase may follow which.
- `events`: what happens to a push.
- `effects`: what is to be done about it.
- `shown`: what everybody sees of a push, and what it waits for.
- `rank_progress`: how far a push and each of its ranks are, and when it is given up.
- `answers`: what its callers are answered.
- `opening`: what a request to open a version leads to.
"""
