"""Plans: copies of bytes between layouts. Pure, except for the buffers that a transfer fills.

May import: `weighbridge_storage`, `weighbridge`.

- `relations`: relations of tensor spaces, from boxes to boxes.
- `planning`: copies from a source layout to a target layout, and proof that every byte is copied.
- `transfers`: execution of a plan, range by range of a stream.
- `casting`: casts of outgoing streams; `quantised_scales`: tensors that are never cast.
- `push_plan`: shards that each rank pushes, and the place of every byte.
- `placed_ranges`: parts of streams that are not in exactly one place of the files.
- `replica_placement`: the replica that assembles each file.
- `declarations`: declarations of the ranks of a push, and their agreement.
"""
