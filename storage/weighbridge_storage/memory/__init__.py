"""Images: memory and files in which the service assembles versions and from which it reads them.

May import: `stores.objects`, `weighbridge`.

- `regions`: regions of memory or disk, and which processes may still write to them.
- `images`: buffers of one version.
- `image_pool`: pool of images, which reuses memory.
- `image_books`: bookkeeping of regions and reservations.
- `image_decisions`: decision on the placement of an image: in memory, on disk, later, or never.
- `memory_limits`: limits of this process.
- `file_bytes`: random-access reader of one file of a version: in memory, or by pread.
- `read_checks`: comparison of reads with digests.
"""
