"""Admission: what somebody may have, and whose turn it is, before any work is done for them.

May import: `access`, `runtime`, `weighbridge_storage`, `weighbridge`; nothing here knows of gRPC or HTTP.

- `quotas`: quotas of hosts in what is limited.
- `turns`: whose turn is next.
- `identity_quotas`: quotas of identities, by the limits of the policy.
- `buckets`: token bucket; pure.
- `rates`: calls that a host may begin in a second.
- `refusals`: ranks that cannot take part in a push, told to those that come later.
- `tickets`: tickets for streams of weights.
- `message_waits`: how long a message may take to come.
- `byte_budget`: bytes in flight.
- `piece_room`: pieces of files on their way to readers over HTTP.
- `reader_shares`: memory that readers keep on the local lane.
"""
