"""Object store in a bucket of an S3 server.

May import: `stores.objects`, `documents`, `weighbridge`; only `client` may import boto3.

- `store`: the store.
- `settings`: locations and settings; does not import boto3.
- `client`: requests to the server.
- `reads`: reads of one object.
- `uploads`: uploads in one request or in parts.
- `parts`: parts of an object, within a memory limit.
- `errors`: translation of the server's errors.
"""
