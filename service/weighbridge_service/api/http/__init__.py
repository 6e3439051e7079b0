"""HTTP server: status, exports, probes, and routes for Hugging Face's clients.

May import: `api.lane`, `service`, and folders below.

- `app`: the application and its routes.
- `derived`: routes and schemas derived from the table of operations and from dataclasses.
- `parameters`: parameters of paths and members of bodies.
- `resources`: bodies of requests and responses.
- `reports`: response bodies of `operations`.
- `refs`: routes of requests to change refs, with their bodies.
- `engines`: routes of engines, with their bodies.
- `problems`: RFC 9457 problem documents.
- `bodies`: limits of request bodies.
- `operations`: probes, checks, memory, usage, metrics.
- `metrics`: metrics for Prometheus.
- `tracing`: traces of requests.
- `ranges`: ranges of a file, and conditions on its content (RFC 9110).
- `heads`: responses to HEAD.
- `callers`: the identity and permissions of a request's caller.
- `connections`: limits of connections.
- `guard`: refusal of requests from pages of other sites.
- `threads`: threads for handlers that wait for the store.
- `pages`: HTML pages.
- `hub_routes`: routes for Hugging Face's clients.
- `hub_documents`: a version as documents for these clients.
- `hub_reading`: lookup and reads of versions for these clients.
"""
