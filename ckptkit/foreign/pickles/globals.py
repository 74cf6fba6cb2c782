"""The globals that a pickle may name, and what each stands for here: a type of elements, a call
that is told and not made, or a plain value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptkit.model.dtype import DTYPES as KNOWN

DTYPES = {f"torch.{dtype.torch}": dtype for dtype in KNOWN.values()}
"""Torch's element types, and what they are here."""

STORAGES = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    # Of any type: its elements are bytes.
    "torch.UntypedStorage": "uint8",
    "torch.storage.UntypedStorage": "uint8",
}
"""Torch's classes of storages, with our names for their elements."""

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_PLACEMENTS = "Shard Replicate _StridedShard Partial _Partial"
_CLASSES = {
    "torch": "Tensor",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state _rebuild_wrapper_subclass",
    "torch.nn.parameter": "Parameter",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    # Of DCP.
    f"{_CHECKPOINT}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata StorageMeta "
    "ChunkStorageMetadata TensorProperties MetadataIndex _MEM_FORMAT_ENCODING",
    f"{_CHECKPOINT}.filesystem": "_StorageInfo",
    # Of tensors that are spread over ranks.
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
    "torch.distributed.tensor.placement_types": _PLACEMENTS,
    "torch.distributed._tensor.placement_types": f"{_PLACEMENTS} DTensorSpec TensorMeta",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    f"{_SHARDED}.metadata": "ShardMetadata",
    f"{_SHARDED}.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    f"{_SHARDED}.sharded_tensor.shard": "Shard",
    f"{_SHARDED}.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties "
    "MEM_FORMAT_ENCODING",
    f"{_SHARDED}.sharding_spec": "ChunkShardingSpec EnumerableShardingSpec",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    f"{_SHARDED}.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed.remote_device": "_remote_device",
    # Of DeepSpeed.
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
    # Of Megatron: what it saves beside tensors.
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "_io": "BytesIO",
    "numpy.dtypes": "UInt32DType",
    f"{_CHECKPOINT}.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
}
CALLS = frozenset(
    f"{module}.{name}" for module, names in _CLASSES.items() for name in names.split()
)
CALLS_BELOW = "megatron."
"""Classes of this package are calls that are told, too: which ones a training script has among its
arguments differs by version.
"""
ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
# A class inside of a class: what torch.save asks `getattr` for, and the only thing that it may.
_INNER = (f"{_SHARDED}.sharded_tensor.api.ShardedTensor", "ProcessGroupState")


@dataclass(frozen=True, slots=True)
class Global:
    """A global that a pickle names and does not call, such as the class of a storage."""

    name: str


@dataclass(slots=True, eq=False)
class Placeholder:
    """What a pickle would make by a call: the name of what it calls, with what it would pass."""

    name: str
    args: tuple[Any, ...]
    state: Any = field(default=None, repr=False)
    """What would become its attributes; it may refer back to the placeholder."""
    items: list[Any] = field(default_factory=list)
    """What would be put into it; of maps pairs."""

    @property
    def kind(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def fields(self) -> dict[str, Any]:
        """Its attributes, as far as its state tells them."""
        if type(self.state) is dict:
            return self.state
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}


def _mapping(items: Any = (), *, checked: Callable[[Any], Any]) -> dict[Any, Any]:
    if isinstance(items, Global):  # the factory of a defaultdict
        return {}
    pairs = items.items() if type(items) is dict else items
    pairs = [(checked(key), value) for key, value in pairs]
    if not all(type(key) in (str, int) for key, _ in pairs):
        raise ValueError("a key of a map that is neither text nor number")
    return dict(pairs)


def _encoded(text: str, encoding: str) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("an encoding of other than bytes")
    return text.encode("latin1")


def _size(values: Iterable[int]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int for value in found):
        raise ValueError("a size of other than numbers")
    return found


def _device(kind: str, index: int | None = None) -> str:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise ValueError("not a device")
    return kind if index is None else f"{kind}:{index}"


def _path(*parts: str) -> str:
    if not all(type(part) is str for part in parts):
        raise ValueError("not a path")
    return "/".join(parts).replace("//", "/")


def _attribute(of: Any, name: Any) -> Any:
    if isinstance(of, Global) and (of.name, name) == _INNER:
        return Global(".".join(_INNER))
    raise ValueError("it asks for an attribute of something")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    """A bytearray; not one of so many zeros, which a number would ask for."""
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    return _encoded(data, encoding)


def _set(values: Any = (), *, checked: Callable[[Any], Any]) -> set[Any]:
    found = [checked(value) for value in values]
    if not all(type(value) in (str, int, bytes, float, bool, type(None)) for value in found):
        raise ValueError("a set of other than plain values")
    return set(found)


def _list(values: Any = ()) -> list[Any]:
    if type(values) not in (list, tuple):
        raise ValueError("not the items of a list")
    return list(values)


def _complex(real: Any, imag: Any = 0.0) -> complex:
    if not all(type(part) in (int, float) for part in (real, imag)):
        raise ValueError("not a complex number")
    return complex(real, imag)


def _layout(name: Any) -> str:
    if type(name) is not str:
        raise ValueError("not a layout")
    return name


# Of what has keys, or is made of them, which are checked before it is made.
KEYED: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.dict": _mapping,
    "builtins.set": _set,
    "builtins.frozenset": _set,
}
# Functions of ours that give the plain value in place of what a pickle calls.
VALUES: dict[str, Callable[..., Any]] = {
    **KEYED,
    "builtins.list": _list,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.getattr": _attribute,
    "_codecs.encode": _encoded,
    "pathlib.PosixPath": _path,
    "pathlib.WindowsPath": _path,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
