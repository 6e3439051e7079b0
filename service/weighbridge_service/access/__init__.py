"""Access: who somebody is, by what they show, and what they may do.

Whoever listens makes an `Evidence` of what a connection shows; `Access` says whose it is; `peer.authorize` asks what that identity may.

May import: `runtime`, `weighbridge_storage`, `weighbridge`; nothing here knows of gRPC's calls or HTTP's requests.

- `scopes`: verbs, and scopes: what an identity may do with which models and refs.
- `identities`: evidence, and the identities that it proves.
- `tokens`: secrets that are kept as digests.
- `issuers`: issuers of JSON web tokens, and their keys.
- `policy`: the file that says who may do what, and how much.
- `access`: which identity a piece of evidence proves, now.
- `certificates`: the service's own certificate, renewed while it runs.
- `peer`: who has made a call, and whether they may: the place where every face asks.
- `audit`: the record of who did what.
"""
