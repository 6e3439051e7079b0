"""Doctor: examines this machine and the services that it uses, and reports findings.

May import: as `weighbridge._cli`.

- `checks`: findings from readings. Pure.
- `releases`: supported releases of other packages, and findings about installed ones. Pure.
- `readings`: readings of this machine, and of connections to a service.
- `asking`: requests to a service's HTTP endpoint.
"""
