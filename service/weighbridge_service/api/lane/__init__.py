"""Local lane: shared memory for processes on the same machine, granted over a Unix socket.

May import: `service`, and folders below.

- `server`: the socket, and a thread for each client.
- `session`: one client, and its loans of memory.
- `trust`: the users whose processes may write to granted memory.
- `peer_process`: the process at the other end of a connection.
- `plans`: plans as messages.
"""
