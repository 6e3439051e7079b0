"""Messages on the wire: channels, retries, framing, and connections that carry weights.

May import: `_core`, `weighbridge.errors`, `weighbridge.v1`.

- `addresses`: addresses of a service's replicas, and the one in use.
- `credentials`: by what a client knows the service, and is known.
- `processes`: the process that connections belong to.
- `proxies`: the proxy that a connection passes, if it may pass one.
- `rpc`: channels, deadlines, and errors as they were raised on the other side.
- `backoff`: pauses between tries.
- `outages`: what is told of a service that cannot be reached.
- `wire`: the vocabulary as protobuf messages and back.
- `wire_operations`: messages of the operations in the table.
- `wire_engines`: engines, likewise.
- `pieces`: messages that carry weights, with one copy.
- `request_parts`: large requests in several messages.
- `varints`: protobuf's integers.
- `bulk`: streams of weights over connections of their own.
- `bulk_entry`: port and ticket of those connections.
"""
