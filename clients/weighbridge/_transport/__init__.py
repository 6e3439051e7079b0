"""Messages on the wire: channels, retries, framing, and connections that carry weights.

May import: `_core`, `weighbridge.errors`, `weighbridge.v1`.

- `addresses`: addresses of a service's replicas, and the one in use.
- `credentials`: credentials of the service and of the client.
- `processes`: the process that connections belong to.
- `proxies`: the proxy of a connection, if it may use one.
- `rpc`: channels, deadlines, and errors of the service raised as they were there.
- `backoff`: pauses between retries.
- `outages`: log messages about an unreachable service.
- `wire`: the vocabulary as protobuf messages and back.
- `wire_operations`: messages of the operations in the table.
- `wire_engines`: engines as protobuf messages and back.
- `pieces`: messages that carry weights, with one copy.
- `request_parts`: large requests in several messages.
- `varints`: protobuf's integers.
- `bulk`: streams of weights over connections of their own.
- `bulk_entry`: port and ticket of those connections.
"""
