"""Files of a model besides its weights: config, tokenizer, chat templates, code, licence, in the model's folder and in
folders of it.

May import: `_core`, `weighbridge.errors`.

- `choice`: files of a folder that belong to the model, and those that are left out, with the reason.
- `regular`: regular files of a folder, links followed as far as the folder.
- `reading`: the chosen files of a folder, read.
- `carried`: files of a version that is pushed from a folder.
- `signature_files`: signatures beside the files of a version.
"""
