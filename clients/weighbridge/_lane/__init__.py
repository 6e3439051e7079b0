"""Client of the local lane: shards are written, and slices read, where the version lies.

May import: `_core`, `_formats`, `_memory`, `_transport`, `weighbridge.errors`, `weighbridge.v1`.

- `local_lane`: the lane of one client.
- `connection`: the connection to the service's Unix socket.
- `protocol`: messages on that socket, and descriptors with them.
- `plans`: plans that the service has sent, and their copies.
- `loans`: memory on loan, for writing and for reading.
- `arrival_marks`: marks of what has arrived of a version that is still being received.
- `stored_files`: files on loan, which are read.
"""
