"""Vocabulary of the SDK, the storage and the service: values without I/O.

May import: `weighbridge.errors`.

- `boxes`: boxes of a tensor and their arithmetic.
- `byte_copies`: strided copies between a stream and a file.
- `layouts`: which boxes of which tensors are where.
- `slices`: what an engine can ask for.
- `dtypes`: element types and their names.
- `nonfinite`: which elements are NaN or infinite, and how many.
- `block_scales`: names and shapes of block-quantised weights.
- `range_set`: sets of positions in a stream.
- `striping`: bytes that each of several streams brings.
- `tensor_spaces`: whose names the tensors of a layout have.
- `megatron_rank`: position of a rank in the grids of a training job.
- `references`: a model and one of its versions, as they are named.
- `manifest_text`: the manifest of a version as a client reads it.
- `file_names`: names of a version's files.
- `engines`: engines that serve versions.
- `resources`: models, versions, retention, as the service reports them.
- `operations`: calls of the control API, as data.
- `metadata`: what a trainer says of a version, and comparisons with it.
- `reports`: what a service reports on its work.
- `checks`: findings of ``weighbridge doctor``.
- `json_values`: values as JSON.
- `pauses`: lengths of pauses between tries, and random numbers of this package's own.
- `text`: words for people.
- `lru`: bounded cache of the values used last.
"""
