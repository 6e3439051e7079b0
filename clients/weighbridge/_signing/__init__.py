"""Signatures of versions in the format of OpenSSF model signing: statement, signer, and check against trusted keys.

May import: `_clients`, `_core` and folders below. The packages of the extra `signing` (model-signing, cryptography) are
imported when a version is signed or checked; `statement` and `bundle` need none of them, and the service uses these two
as well.

- `signatures`: signatures beside a client.
- `steps`: signing and checking of a version as steps without I/O.
- `statement`: the signed statement about the files.
- `bundle`: reader of a signature's file.
- `signer`: private keys, and certificates for them.
- `trust`: public keys and authorities, and whether a signature is by one of them.
- `checking`: whether a version is signed by all that are required.
- `library`: model-signing over digests that are known already.
- `in_memory`: files without a disk, for a library that requires paths.
"""
