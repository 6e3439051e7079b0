"""Push of one version, from its opening until it is durable, failed or aborted.

May import: `admission`, `catalog`, `metrics`, `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `machine`: events in, the next state and effects out; pure.
- `opener`: finds the session of a version, or begins one.
- `refusals`: errors of ranks that cannot take part in a push; later ranks of the same push get the same error.
- `intake`: calls of ranks and of other replicas.
- `registry`: the sessions of this process.
- `session`: owner of the state of one version.
- `observing`: metrics and traces of a push.
- `effect_runner`: carries effects out; resources that all pushes share.
- `effect_pools`: threads for effects.
- `timers`: wake-ups of sessions.
- `ended`: the record of a push that has ended.
- `pending`: an answer that is not available yet.
- `declared_layouts`: layouts that the ranks of one version have declared.
- `filling`: the data plane; copies pieces into the image.
- `image_allocator`: images of versions, and memory ahead of them.
- `mappings`: processes that may have images mapped.
- `publisher`: reads and writes of a push in the store.
- `replica_checksums`: compares the bytes that several ranks hold under one box.
- `replica_exchange`: messages between replicas, written to and read from the store.
- `handover`: the data that one replica sends when it hands a push over to another; `taking_over`: the receiving side.
"""
