"""Local lane: loans of memory to processes of the same machine, over a Unix socket.

May import: `service`, and folders below.

- `server`: the socket, and a thread for each client.
- `session`: one client, and what it was lent.
- `trust`: to whom memory is lent for writing.
- `peer_process`: the process at the other end.
- `plans`: plans as messages.
"""
