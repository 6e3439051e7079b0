"""Stored documents as values: names, keys, text and digests.

May import: `weighbridge`.

- `names`: names of models, refs, files and versions, and their keys in a store.
- `strict_json`: strict reader and writer of JSON.
- `document_digests`: digests that reveal damage to a document.
- `entries`: versions, refs and requests in heads and histories.
- `entry_json`: entries as objects of stored JSON text.
"""
