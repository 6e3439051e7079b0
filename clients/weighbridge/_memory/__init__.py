"""Memory that is shared with the service: mappings, and strided copies between them and tensors.

May import: `_core`, `weighbridge.errors`.

- `mappings`: a mapping of the service's memory, and its registration with CUDA.
- `passing_writes`: copies of tensors that exist only for a moment.
- `paging`: huge pages of a mapping.
- `strided`: strided copies as values, and on bytes.
- `file_reads`: strided reads of a file.
- `copying`: the same on tensors of any device.
- `casting`: the same with a cast to another dtype.
- `native_copies`: copies and counts by the C extension `_native`.
- `tensor_counts`: counts of non-finite elements by torch, on any device.
- `cuda_copies`: copies by a GPU's copy engines.
- `copy_steps`: steps of a copy for these.
- `byte_rows`: rows of many shards, copied in one call.
- `word_sums`: sums that compare a copy of a tensor with its source.
- `sampling`: parts of a stream that are compared again.
"""
