"""Settings, limits and clock of the process.

May import: `weighbridge_storage`, `weighbridge`.

- `config`: settings of a service.
- `tls_files`: files of TLS.
- `clock`: the wall clock of heads, leases and versions.
- `memory_plan`: memory budget, and its effects on pushes.
- `process_memory`: settings of the allocator and the garbage collector.
- `descriptors`: file descriptors, and the share of each port.
"""
