"""Data plane of one push: fills the image of its version.

May import: what `push` may, and of `push` only `machine`.

- `image_writer`: writes pieces to the image, and grants the image to processes.
- `arrivals`: marks of arrived tensors, for processes that read them before the version is ready.
- `sample`: pieces that are compared with the image when the version is verified.
"""
