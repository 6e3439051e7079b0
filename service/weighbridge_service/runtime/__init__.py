"""Settings, limits and clock of the process.

May import: `weighbridge_storage`, `weighbridge`.

- `config`: settings of a service.
- `tls_files`: files of TLS.
- `clock`: time as heads, leases and versions count it.
- `memory_plan`: budget of memory, and what it means for a push.
- `process_memory`: allocator and garbage collector of a process that carries weights.
- `descriptors`: file descriptors, and their share for each port.
"""
