"""Forms of weights in files and processes. Each has a layout and a stream of its bytes.

May import: `_core`, `_memory`, `_transport`, `weighbridge.v1`, `weighbridge.errors`.

- `safetensors_files`: headers and offsets of safetensors files.
- `hf_folder`: Hugging Face folders.
- `side_files`: their files other than weights.
- `naming`: which files and parameters belong to a model, by their names.
- `folder_weights`: the weights of such a folder as a stream.
- `dequantizing`: block-quantised weights as floating-point ones.
- `megatron_state`: the shards of a ``sharded_state_dict``.
- `torch_state`: the tensors of a torch state dict that has Hugging Face's names.
- `misfits`: problems of given tensors.
- `peft_models`: models with peft adapters.
- `gathered_shards`: shares of whole tensors that all ranks receive one after another.
- `passing_chunks`: chunks of a stream whose shards arrive one after another.
- `memory_forms`: tensors that are stacked, merged or renamed in memory.
- `dtensors`: boxes and local tensors of DTensors.
- `flat_ranges`: ranges of flat tensors as boxes.
- `zero3`: parameters partitioned by DeepSpeed's ZeRO-3.
- `shifts`: constants that are added to elements during a transfer.
- `tensor_stream`: tensors as a stream of bytes, and back.
- `push_counts`: count of the non-finite elements of a push.
- `replica_checksums`: checksums of shards that other ranks also have.
- `push_sources`: bytes of a rank's stream while it is pushed.
- `host_slices`: slices of a version in host memory.
"""
