"""State machine of one push: values and pure functions. No clock, no lock, no I/O.

May import: `catalog.holding`, `plan`, and the values and errors of `weighbridge_storage` and `weighbridge`; nothing
else of `push`.

- `transitions`: the step function: an event in, the next state and effects out.
- `wanted`: effects that a state needs, and the earliest time of each.
- `ends`: the ends of a push, and the events, failures and timeouts that lead to them.
- `state`: a push at one moment.
- `phases`: phases of a push, and the transitions between them.
- `events`: inputs of the state machine.
- `effects`: outputs of the state machine, for the session to carry out.
- `shown`: the version as readers see it, and what the push waits for.
- `rank_progress`: progress of a push and of each of its ranks, as readers see it.
- `answers`: answers to the callers of a push.
- `opening`: the outcome of a request to open a version.
"""
