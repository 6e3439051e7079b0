"""Doctor: what is looked at on this machine and at the services it talks to, and what is made of it.

May import: as `weighbridge._cli`.

- `checks`: findings from readings. Pure.
- `releases`: releases of other packages that are supported, and what is found of those installed. Pure.
- `readings`: readings of this machine, and of connections to a service.
- `asking`: questions to a service's HTTP face.
"""
