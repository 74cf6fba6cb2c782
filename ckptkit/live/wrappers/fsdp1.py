"""FullyShardedDataParallel (FSDP1): read and loaded through its sharded state dict.

The rows could be cut out of the flat parameters here, as those of an optimizer's state are. But the
hooks of modules, which may add to a state dict or take from it what they make of their parameters,
find these whole only while torch itself makes the state dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ckptkit.live.state.lines import Line, SharedOut, line_of
from ckptkit.live.state.tensors import dtype_name, local_of
from ckptkit.live.wrappers.entries import ModelEntry, canonical_names, state_of
from ckptkit.live.wrappers.flat import (
    JoinedMeshes,
    as_dtensor,
    cut_further,
    flats_of,
    height,
    of_all_ranks,
    rows_of,
    shard_mesh,
)

_STAGES = {
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.HYBRID_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy._HYBRID_SHARD_ZERO2: 2,
    ShardingStrategy.NO_SHARD: 0,
}


def is_used(module: nn.Module) -> bool:
    """Whether some part of a module is wrapped so."""
    return any(isinstance(m, FullyShardedDataParallel) for m in module.modules())


def lines(module: nn.Module) -> list[Line]:
    """The ranks over which it cuts, and those that repeat (`HYBRID_SHARD`, `NO_SHARD`)."""
    found: list[Line] = []
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        whole = unit.sharding_strategy == ShardingStrategy.NO_SHARD
        groups = [("ddp" if whole else "fsdp", unit.process_group)]
        # Not by getattr, which goes on to the wrapped module.
        between = vars(unit).get("_inter_node_pg")
        if between is not None:
            groups.append(("ddp", between))
        mesh: Any = unit._device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        named = {mesh.get_group(dim): name for dim, name in enumerate(names)}
        found += [line_of(kind, group, named.get(group, "")) for kind, group in groups]
    return list(dict.fromkeys(found))


def details(module: nn.Module) -> dict[str, Any]:
    """How it shards, the stage of ZeRO that this is, its precision and offloading."""
    units = FullyShardedDataParallel.fsdp_modules(module)
    if not units:
        return {}
    mixed = [unit.mixed_precision for unit in units]
    return {
        "fsdp": {
            "sharding_strategy": _agreed(unit.sharding_strategy.name for unit in units),
            "zero_stage": _agreed(_STAGES[unit.sharding_strategy] for unit in units),
            "units": len(units),
            "use_orig_params": _agreed(unit._use_orig_params for unit in units),
            "mixed_precision": {
                "parameters": _agreed(dtype_name(each.param_dtype) for each in mixed),
                "reduction": _agreed(dtype_name(each.reduce_dtype) for each in mixed),
                "buffers": _agreed(dtype_name(each.buffer_dtype) for each in mixed),
            },
            "cpu_offload": _agreed(unit.cpu_offload.offload_params for unit in units),
        }
    }


def _agreed(values: Iterable[Any]) -> Any:
    """The value that all have; a list of those that some have."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else distinct


def entries(module: nn.Module) -> list[ModelEntry]:
    """Copies of this rank's rows of each parameter, and the buffers. A collective."""
    canonical = canonical_names(module)
    pieces = [piece for flat in flats_of(module) for piece in flat.slices]
    parameters = {name for piece in pieces for name in (piece.name, *piece.also)}
    found: dict[str, ModelEntry] = {}
    with _sharded(module):
        for key, value in state_of(module).items():
            name = canonical(key)
            is_parameter = name in parameters or isinstance(value, nn.Parameter)
            if not isinstance(value, ShardedTensor):
                # FSDP keeps alike what it has flattened: with other parameters it does nothing.
                is_kept = name in parameters
                entry = ModelEntry(name, value, is_parameter, source=(key, None))
                found[name] = replace(entry, is_kept_alike=is_kept)
                continue
            shards, shape = value.local_shards(), tuple(value.size())
            local = torch.empty((0, *shape[1:]), dtype=value.dtype)
            if shards:
                local = shards[0].tensor
            ranks = dist.get_process_group_ranks(value._process_group)
            shared = SharedOut(tuple(ranks), shape)
            found[name] = ModelEntry(name, local, is_parameter, shared, (key, value))
    for piece in pieces:
        first = found.get(piece.name)
        for name in piece.also:  # the same value, loaded under both names
            if name in found and first is not None:
                source = (found[name].source[0], first.source[1])
                found[name] = replace(first, name=name, is_parameter=True, source=source)
    return list(found.values())


def absorb(module: nn.Module, entries: Sequence[ModelEntry]) -> None:
    """Load what was filled. A collective."""
    state = {}
    for entry in entries:
        key, cut = entry.source
        state[key] = entry.value if cut is None else cut
    with _sharded(module):
        module.load_state_dict(state, strict=False)


@contextmanager
def _sharded(module: nn.Module) -> Iterator[None]:
    """Have state dicts sharded, in host memory: beside the model there may be no room for them."""
    config = ShardedStateDictConfig(offload_to_cpu=True)
    kind = StateDictType.SHARDED_STATE_DICT
    with warnings.catch_warnings():
        # That all of this is deprecated, and that unsharded modules give whole tensors.
        warnings.simplefilter("ignore")
        with (
            FullyShardedDataParallel.state_dict_type(module, kind, config),
            _cut_in_rows(module),
        ):
            yield


@contextmanager
def _cut_in_rows(module: nn.Module) -> Iterator[None]:
    """Have state dicts cut in rows, where torch would cut them otherwise or not at all."""
    joined: JoinedMeshes = {}
    known: list[tuple[Any, Any]] = [
        (unit, unit._fsdp_extension) for unit in FullyShardedDataParallel.fsdp_modules(module)
    ]
    for unit, extension in known:
        if extension is not None or unit._device_mesh is None:
            unit._fsdp_extension = _Rows(extension, unit.process_group, joined)
    try:
        yield
    finally:
        for unit, extension in known:
            unit._fsdp_extension = extension


class _Rows(DTensorExtensions):
    """Cuts state dicts into rows of what tensor parallelism has left to a rank, and puts these
    together. Where FSDP has a part of a mesh, torch cuts what tensor parallelism repeats along the
    first dim of the whole mesh, whose ever that is, and takes uneven parts for even ones.
    """

    def __init__(self, extension: object, group: dist.ProcessGroup, joined: JoinedMeshes) -> None:
        vars(self).update({} if extension is None else vars(extension))
        self._group = group
        self._joined = joined

    def chunk_tensor(self, tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        """Give this rank's rows; torch refuses those that do not lie row by row."""
        return _create_chunk_sharded_tensor(tensor.contiguous(), *where, **how)

    def chunk_dtensor(
        self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        """Give this rank's rows."""
        local = local_of(tensor)
        if isinstance(tensor, DTensor):
            spec = cut_further(tensor._spec, device_mesh, self._joined)
        else:
            meta = TensorMeta(local.shape, local.stride(), local.dtype)
            spec = DTensorSpec(shard_mesh(device_mesh), (Shard(0),), tensor_meta=meta)
        rows = rows_of(local, rank, self._group.size())
        return as_dtensor(rows.clone(memory_format=torch.contiguous_format), spec)

    def all_gather_dtensor(
        self,
        tensor: DTensor,
        parent_mesh: DeviceMesh | None,  # noqa: ARG002 — another's interface
    ) -> torch.Tensor:
        """Give what tensor parallelism has left to this rank."""
        mesh, rows = tensor.device_mesh, tensor._local_tensor
        shape = tuple(tensor.shape)
        if mesh.ndim > 1:
            names = mesh.mesh_dim_names or ()
            shape, _ = compute_local_shape_and_global_offset(
                shape, mesh[names[1:]], tensor.placements[1:]
            )
        ranks = self._group.size()
        mine = rows.new_zeros((height(shape[0], ranks), *shape[1:]))
        mine[: len(rows)] = rows
        found = of_all_ranks(mine.view(-1), self._group)
        return found.view(len(mine) * ranks, *shape[1:])[: shape[0]]
