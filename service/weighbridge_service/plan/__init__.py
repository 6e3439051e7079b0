"""Plans: which bytes go where. Pure but for the buffers that a transfer fills.

May import: `weighbridge_storage`, `weighbridge`.

- `relations`: how two tensor spaces relate: boxes to boxes.
- `planning`: copies from a source layout to a target layout, and the proof that none is missing.
- `transfers`: a plan carried out, range by range of a stream.
- `casting`: another dtype on the way out; `quantised_scales`: what is not cast.
- `push_plan`: who pushes what, and where every byte goes.
- `placed_ranges`: parts of streams that do not lie in exactly one place of the files.
- `replica_placement`: which replica assembles which file.
- `declarations`: what the ranks of a push declare, and their agreement.
"""
