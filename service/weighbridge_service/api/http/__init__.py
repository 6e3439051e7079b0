"""HTTP face: status, exports, probes, and the routes of Hugging Face's clients.

May import: `api.lane`, `service`, and folders below.

- `app`: the application and its routes.
- `derived`: routes and schemas that follow from the table of operations and from values.
- `parameters`: parameters of paths and members of bodies.
- `resources`: bodies of requests and responses.
- `reports`: bodies of what `operations` answers.
- `refs`: routes of requests to change refs, with their bodies.
- `engines`: routes of engines, with their bodies.
- `problems`: RFC 9457 problem documents.
- `bodies`: limits of requests' bodies.
- `operations`: probes, checks, memory, usage, metrics.
- `metrics`: what Prometheus is told.
- `tracing`: traces of requests.
- `ranges`: ranges of a file, and conditions on its content (RFC 9110).
- `heads`: answers to HEAD.
- `callers`: who has sent a request.
- `connections`: limits of connections.
- `guard`: refusal of requests that other sites' pages send.
- `threads`: threads of handlers that wait for the store.
- `pages`: pages for people.
- `hub_routes`: routes of Hugging Face's clients.
- `hub_documents`: a version as these clients see it.
- `hub_reading`: lookup and reads of versions for them.
"""
