"""Access: the identity of a caller, proved by the caller's evidence, and the scopes that it has.

The server of each protocol builds an `Evidence` from a connection; `Access` resolves it to an `Identity`;
`peer.authorize` checks the identity's scopes.

May import: `runtime`, `weighbridge_storage`, `weighbridge`; nothing here knows of gRPC's calls or HTTP's requests.

- `scopes`: verbs, and scopes that allow an identity a verb on some models and refs.
- `identities`: evidence, and the identities that it proves.
- `tokens`: secrets, stored as digests.
- `issuers`: issuers of JSON web tokens, and their keys.
- `policy`: the file that lists identities with their scopes and limits.
- `access`: the identity that a piece of evidence proves under the current policy, at first and while a call lasts.
- `certificates`: the service's own certificate, renewed while it runs.
- `peer`: the caller of a call, and the authorization check that every protocol makes.
- `audit`: the audit log.
"""
