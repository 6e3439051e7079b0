"""Pages for people: which engine serves which bytes, why, and what the last push cost.

Rendered here and sent as they are: no other host, no inline script or style. A page is a view, a frozen value whose fields are its
fragments; a pure function makes it of what was read, and a template lays each field out. Pages that are open get the fragments that change.

May import: `callers`, `problems` and `guard` beside this folder, `exports`, `service`, and what these may.

- `routes`: the pages, their streams of events, and what they are made of.
- `actions`: forms: tags, approvals, exports.
- `login`: sessions of browsers.
- `page_route`: what every route of this folder has: the session, the policy of its content, and errors as pages.
- `live`: fragments for the pages that are open.
- `rendering`: views as HTML.
- `reading`: what views are made of, read from the service.
- `viewer`: what somebody may who looks at a page; pure.
- `index_view`, `model_view`, `version_view`: views of pages; pure.
- `push_view`, `engine_view`, `refs_view`, `timeline_view`, `exports_view`: views of the parts of a model's page; pure.
- `version_summary`: what pages say of a version; pure.
- `side_by_side`: metadata of versions as columns and pictures, and two versions compared; pure.
- `words`: figures as text; pure.
- `distributions`: a tensor's values as a small picture.
"""
