"""Admission: who may have how much, and whose turn it is, before any work is done for them.

A limit is of a host, an identity, a namespace or the process, and each is counted in one of four ways: what is held at one time (`quotas`), what comes
in a second (`rates`), what was done within an hour (`identity_quotas`), and what lies in the store (`stored_bytes`). A caller that finds no
room is refused with ResourceExhausted, which says when to ask again; streams of weights wait for room, in turns.

May import: `access`, `runtime`, `weighbridge_storage`, `weighbridge`; nothing here knows of gRPC or HTTP.

- `quotas`: shares of hosts in what is held.
- `rates`: token buckets of hosts and identities.
- `turns`: whose turn is next.
- `identity_quotas`: streams, bytes a second and versions an hour of identities, by the limits of the policy.
- `stored_bytes`: what namespaces hold, and whether there is room for more.
- `policy_quotas`: all that the policy limits, when a version is opened and for those who ask.
- `tickets`: tickets for streams of weights.
- `message_waits`: how long a message may take to come.
- `byte_budget`: bytes in flight.
- `piece_room`: pieces of files on their way to readers over HTTP.
- `reader_shares`: memory that readers keep on the local lane.
"""
