"""Signatures of versions, as OpenSSF model signing has them: what is signed, by whom, and whether that is trusted.

May import: `_clients`, `_core` and folders below. What needs the extra `signing` (model-signing, cryptography) is imported when something is signed or
checked; `statement` and `bundle` need nothing, and the service uses them, too.

- `signatures`: signatures beside a client.
- `steps`: signing and checking of a version as steps without I/O.
- `statement`: what a signature says of the files.
- `bundle`: reader of a signature's file.
- `signer`: private keys, and certificates for them.
- `trust`: public keys and authorities, and whether a signature is by one of them.
- `checking`: whether a version is signed by all that are required.
- `library`: model-signing over digests that are known already.
- `in_memory`: files without a disk, for a library that wants paths.
"""
