"""Data plane of one push: bytes into the image of its version.

May import: what `push` may, and of `push` only `machine`.

- `image_writer`: pieces into the image, and grants of it.
- `arrivals`: marks of what has come, for processes that read it before the version is ready.
- `sample`: parts that are compared again when the version is verified.
"""
