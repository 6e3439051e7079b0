"""Vocabulary of the SDK, the storage and the service: values without I/O.

May import: `weighbridge.errors`.

- `boxes`: boxes of a tensor and their arithmetic.
- `byte_copies`: strided copies between a stream and a file.
- `layouts`: tensors, their boxes, and the places of the boxes.
- `slices`: the slices that an engine can request.
- `dtypes`: element types and their names.
- `nonfinite`: finding and counting elements that are NaN or infinite.
- `block_scales`: names and shapes of block-quantised weights.
- `range_set`: sets of positions in a stream.
- `striping`: the bytes that each of several streams transfers.
- `tensor_spaces`: naming schemes of a layout's tensors.
- `megatron_rank`: position of a rank in the grids of a training job.
- `references`: references to a model and one of its versions.
- `manifest_text`: the manifest of a version as a client reads it.
- `file_names`: names of a version's files.
- `engines`: engines that serve versions.
- `resources`: models, versions, retention, as the service reports them.
- `operations`: calls of the control API, as data.
- `metadata`: metadata that a trainer gives a version, and comparisons with it.
- `reports`: reports of a service about its work.
- `checks`: findings of ``weighbridge doctor``.
- `json_values`: values as JSON.
- `pauses`: lengths of pauses between attempts, and the package's own random numbers.
- `text`: text for users.
- `lru`: bounded cache of the most recently used values.
"""
