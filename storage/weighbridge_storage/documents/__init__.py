"""Stored documents as values: names, keys, text and digests.

May import: `weighbridge`.

- `names`: names of models, refs, files and versions, and their keys in a store.
- `strict_json`: JSON that is read without trusting it.
- `document_digests`: digests by which damage to a document is found.
- `entries`: versions, refs and requests, as heads and histories hold them.
- `entry_json`: entries as objects of stored JSON text.
"""
