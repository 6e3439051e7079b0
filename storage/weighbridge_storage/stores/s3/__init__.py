"""Object store in a bucket of an S3 server.

May import: `stores.objects`, `documents`, `weighbridge`; boto3 in `client` alone.

- `store`: the store.
- `settings`: locations and settings; imports nothing of boto3.
- `client`: requests to the server.
- `reads`: reads of one object.
- `uploads`: uploads in one request or in parts.
- `parts`: how an object is cut, within a bound on memory.
- `errors`: what the server's errors mean.
"""
