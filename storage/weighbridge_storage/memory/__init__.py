"""Images: memory and files in which versions are assembled and from which they are read.

May import: `stores.objects`, `weighbridge`.

- `regions`: regions of memory or disk, and who may still write to them.
- `images`: buffers of one version.
- `image_pool`: pool of images, which uses memory again.
- `image_books`: which regions there are, and what is reserved.
- `image_decisions`: decision where an image goes: memory, disk, later, never.
- `memory_limits`: limits of this process.
- `file_bytes`: random-access reader of one file of a version: in memory, or by pread.
- `read_checks`: comparison of what is read with digests.
"""
