"""What torch of older versions writes, written by the torch that is here: what their sources pickle
is put in place of what this one does.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import serialization
from torch.distributed import _mesh_layout
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

VERSIONS = tuple(f"2.{minor}" for minor in range(4, 13))


@dataclass(frozen=True)
class MeshLayout:
    """As torch 2.10 to 2.12 had it: an axis is a size and a stride."""

    shape: torch.Size
    stride: tuple[int, ...]


MeshLayout.__module__, MeshLayout.__qualname__ = _mesh_layout.__name__, "_MeshLayout"


@contextmanager
def written_by(version: str) -> Iterator[None]:
    """What torch of this version would pickle, whoever calls `save`."""
    minor = int(version.removeprefix("2."))
    with ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(target, name, value))

        def without(target: type, *names: str) -> None:
            def state(self: Any) -> dict[str, Any]:
                return {k: v for k, v in vars(self).items() if k not in names}

            stack.enter_context(patch.object(target, "__getstate__", state, create=True))

        if minor < 9:
            without(Metadata, "version")
        if minor < 7:
            without(StorageMeta, "modules")
            put(serialization, "_save", _save_without(".format_version", ".storage_alignment"))
        if minor < 13:
            put(_mesh_layout, "_MeshLayout", MeshLayout)
            put(DeviceMesh, "__getstate__", _mesh_of_tensor if minor < 10 else _mesh_of_layout)
        if minor < 10:
            for placement in (Shard, Replicate, _StridedShard):
                put(placement, "__reduce_ex__", _as_dataclass)
        if minor < 5:
            put(DTensor, "__module__", "torch.distributed._tensor.api")
            for kind in (DTensorSpec, TensorMeta, Shard, Replicate):
                put(kind, "__module__", "torch.distributed._tensor.placement_types")
        yield


def _save_without(*names: str) -> Any:
    real: Any = serialization._save

    class Writer:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write_record(self, name: str, *args: Any) -> None:
            if name not in names:
                self.file.write_record(name, *args)

    return lambda state, file, *rest: real(state, Writer(file), *rest)


def _mesh_of_tensor(self: DeviceMesh) -> dict[str, Any]:
    return {
        "device_type": self.device_type,
        "mesh": self.mesh,
        "mesh_dim_names": self.mesh_dim_names,
        "_flatten_mesh_list": tuple(self.mesh.flatten().tolist()),
        "_thread_id": None,
        "_coordinate_on_dim": list(self.get_coordinate() or ()),
        "_dim_group_names": ["0"] * self.ndim,
        "_hash": None,
    }


def _mesh_of_layout(self: DeviceMesh) -> dict[str, Any]:
    state = {k: v for k, v in vars(self).items() if k != "_pg_registry"}
    return {**state, "_layout": MeshLayout(self.mesh.size(), self.mesh.stride())}


def _as_dataclass(self: Any, _protocol: int) -> Any:
    fields = {key: getattr(self, key) for key in ("dim", "split_factor") if hasattr(self, key)}
    return (copyreg.__newobj__, (type(self),), fields or None)  # type: ignore[attr-defined]
