"""Names that pickles in checkpoints of all kinds may contain. The named objects are never executed; a file that
contains other names is refused.
"""

from __future__ import annotations

from weighbridge._core.dtypes import DTYPES
from weighbridge._trainers.torch_dist.pickles import GETATTR, allow

STORAGES = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.IntStorage": "int32",
    "torch.FloatStorage": "float32",
    "torch.LongStorage": "int64",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
}
"""Torch's names of dtypes, by the storage classes that older dtypes have."""
_OTHER_DTYPES = (
    "complex32 complex128 float8_e4m3fnuz float8_e5m2fnuz float4_e2m1fn_x2 "
    "qint8 quint8 qint32 quint4x2 bits8 bits16 int1 int2 int4 uint1 uint2 uint4"
)
"""Names of torch dtypes that `weighbridge._core.dtypes` does not support. They are listed so that messages can
distinguish them from an attack.
"""
_PATHS = "Path PosixPath PurePath PurePosixPath WindowsPath"
_PLACEMENTS = "Shard _StridedShard Replicate Partial"
_BY_MODULE = {
    "torch": f"device {_OTHER_DTYPES}",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage",
    # .metadata, and the plans of all ranks in it
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta "
    "TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # the folder to which the checkpoint was first written
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    # DTensors
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": _PLACEMENTS,
    # before torch 2.5
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed._tensor.placement_types": f"DTensorSpec TensorMeta {_PLACEMENTS}",
    # ShardedTensors
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    # states of numpy's generators
    "_codecs": "encode",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct",
    "numpy._core.multiarray": "_reconstruct",
}
KNOWN = allow(
    *STORAGES,
    *GETATTR,
    *(f"torch.{dtype.torch_name}" for dtype in DTYPES),
    *(f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split()),
)
