"""Documentation's site: ``python -m docs.website`` makes it in build/site (``make docs``), from docs/ and from what the
code says of itself.

May import: the SDK, the service and what `make docs` installs; each when it is used.

- `pages`: which file of the repository is which page, and its links there.
- `python_api`: pages of the SDK's public names.
- `commands`: page of the command line.
- `contract`: page of the gRPC contract.
- `http_api`: page of the HTTP interface.
- `pictures`: pictures of recorded benchmarks, in docs/pictures.
- `charts`: bars with intervals, as SVG.

What makes the site is Zensical, which its authors maintain in place of Material for MkDocs (its support ends in May
2027, and that of MkDocs 1 has ended). It reads ``mkdocs.yml``, from which MkDocs with that theme makes a site, too.
"""
