"""HTML pages: which engine serves which version, why, and how long the last push took.

The service renders the HTML itself. Pages load nothing from other hosts, and contain no inline scripts or styles. A
page is a view: a frozen dataclass whose fields are its fragments. A pure function builds the view from the facts that
the reader returns, and a template renders each field. Open pages receive the fragments that change.

May import: `callers`, `problems` and `guard` beside this folder, `exports`, `service`, and what these may.

- `routes`: the pages, their event streams, and their static files.
- `actions`: forms: tags, approvals, exports.
- `login`: browser sessions.
- `page_route`: the route class of all pages: session, content security policy, and errors as pages.
- `live`: updated fragments for open pages.
- `rendering`: views as HTML.
- `reading`: the facts that views are built from, read from the service.
- `viewer`: the permissions of a page's viewer; pure.
- `index_view`, `model_view`, `version_view`: views of pages; pure.
- `push_view`, `engine_view`, `refs_view`, `timeline_view`, `exports_view`: views of the parts of a model's page; pure.
- `version_summary`: facts about a version that several pages show; pure.
- `side_by_side`: metadata of versions as columns and pictures, and two versions compared; pure.
- `words`: numbers and times as text; pure.
- `distributions`: a tensor's values as a small picture.
"""
