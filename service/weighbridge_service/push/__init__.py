"""Push: one version from its opening to its being durable, failed or aborted.

May import: `admission`, `catalog`, `metrics`, `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `machine`: events in, the next state and effects out; pure.
- `opener`: the session of a version, found or begun.
- `refusals`: ranks that cannot take part in a push, told to those that come later.
- `intake`: what ranks and other replicas call.
- `registry`: the sessions of this process.
- `session`: owner of the state of one version.
- `observing`: what metrics and traces are told of it.
- `effect_runner`: effects carried out, and what pushes share for that.
- `effect_pools`: threads for effects.
- `timers`: wake-ups of sessions.
- `ended`: what is remembered of a push that has ended.
- `pending`: an answer that has not come yet.
- `declared_layouts`: what the ranks of one version have declared.
- `filling`: the data plane: pieces into the image.
- `image_allocator`: images of versions, and memory ahead of them.
- `mappings`: which process has which memory mapped.
- `publisher`: what a push does in the store.
- `replica_checksums`: what ranks hold under one box, compared.
- `replica_exchange`: what replicas tell each other by way of the store.
- `handover`: a push as it is handed over to another replica; `taking_over`: its takeover there.
"""
