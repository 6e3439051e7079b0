"""Admission: limits and queues that calls pass before the service does any work for them.

A limit applies to a host, an identity, a namespace or the process. Each is counted in one of four ways: amounts held at
the same time (`quotas`), amounts per second (`rates`), versions opened within an hour (`identity_quotas`), and bytes in
the store (`stored_bytes`). A call over its limit is refused with ResourceExhausted, which states when to retry; streams
of weights wait for capacity, in turns.

May import: `access`, `runtime`, `weighbridge_storage`, `weighbridge`; nothing here knows of gRPC or HTTP.

- `quotas`: shares of hosts in limited resources.
- `rates`: token buckets of hosts and identities.
- `turns`: a queue that is fair between hosts and connections.
- `identity_quotas`: streams, bytes per second and versions per hour of identities, by the limits of the policy.
- `stored_bytes`: bytes that namespaces hold in the store, and their limits.
- `policy_quotas`: all limits of the policy, checked when a version is opened, and their usage for reports.
- `tickets`: tickets for streams of weights.
- `message_waits`: timeouts for messages of callers.
- `byte_budget`: bytes in flight.
- `piece_room`: pieces of files that are being sent to readers over HTTP.
- `reader_shares`: memory that readers keep on the local lane.
"""
