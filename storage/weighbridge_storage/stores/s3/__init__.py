"""Object store in a bucket of an S3 server.

May import: `stores.objects`, `documents`, `weighbridge`; boto3 in `client` alone.

- `store`: the store.
- `settings`: locations and settings; imports nothing of boto3.
- `client`: requests to the server.
- `reads`: reads of one object.
- `uploads`: uploads in one request or in parts.
- `parts`: parts of an object, within a bound on memory.
- `errors`: translation of the server's errors.
"""
