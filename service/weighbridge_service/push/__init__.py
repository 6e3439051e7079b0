"""The push: one version from its opening to its being durable, failed or aborted.

Values and decisions, without I/O; `models` uses the first three:

- `declarations`: what ranks hold, to which replica they push, and the agreement that follows
- `push_plan`: who pushes what, and where every byte goes
- `replica_placement`: which replica puts which file together, and which parts of streams go there
- `events`, `effects`: what happens to a push, and what is to be done
- `state`: a push at one moment, what everybody sees of it, what it waits for, what its ranks are answered
- `machine`: the next state and its effects
- `opening`: what a request to open a version leads to

Owners and I/O:

- `intake`: what ranks and other replicas call
- `registry`: the sessions of this process, and what it keeps of those that have ended
- `session`: owns the state of one version
- `ended`: what is remembered of a push that has ended
- `effect_runner`, `effect_pools`, `timers`: carry effects out, and wake sessions
- `image_writer`, `sample`: the data plane, and pieces of it that are compared again
- `publisher`: what a push does in the object store
- `replica_exchange`: what replicas tell each other by way of the store
- `image_allocator`, `mappings`: memory, of versions and ahead of them, and who has which mapped

The owners may import `catalog`, `models` and the storage; the faces (`calls`, `lane_session`) import `intake`, and nothing in
`catalog` or below imports this folder but for what `models` does.
"""
