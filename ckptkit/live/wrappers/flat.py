"""The flat parameters of FSDP1: what each is made of, and how values that are cut like one become
rows of the original parameters and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.live.state.ranks import all_gather_single
from ckptkit.live.state.tensors import local_of, spread_as

JoinedMeshes = dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh]
"""Of a mesh of FSDP1 and one of tensor parallelism: that of both. Made once, it takes a while."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatSlice:
    """A parameter that lies in a flat one, and what of it this rank has."""

    name: str
    also: tuple[str, ...]
    """The other names of a tied parameter."""
    shape: tuple[int, ...]
    """The shape of what tensor parallelism has left to this rank."""
    stride: tuple[int, ...]
    """How it lies in the flat parameter, which keeps the order of its memory."""
    cut: DTensorSpec | None
    """How its rows lie on the ranks, where tensor parallelism has cut it too."""
    start: int
    """Where it begins in the whole flat parameter."""
    first: int
    """The first of its elements in this rank's shard of the flat parameter."""
    count: int
    """How many of them."""
    at: int
    """Where they begin in the shard."""
    holder: nn.Parameter
    """What optimizers step for it: the flat parameter, or the view of it that stands for this one
    with `use_orig_params`."""
    is_view: bool

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def within(self, value: torch.Tensor) -> torch.Tensor:
        """Its elements in a tensor that is kept for its holder."""
        return value.view(-1) if self.is_view else value[self.at : self.at + self.count]

    def elements_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a value of its shape, in the order of memory."""
        ordered = torch.empty_strided(
            self.shape, self.stride, dtype=whole.dtype, device=whole.device
        )
        return ordered.copy_(whole).as_strided((self.size,), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flat parameter, or what an optimizer has of it."""

    parameter: nn.Parameter
    slices: tuple[FlatSlice, ...]
    group: dist.ProcessGroup | None
    """The ranks that it is cut over; None where all have it whole."""
    device: torch.device
    shard_size: int
    """How many elements each rank has, padding included."""

    @property
    def keeps_originals(self) -> bool:
        """Whether the model's parameters are the original ones, as views of this one."""
        return all(piece.is_view for piece in self.slices)

    def holders(self) -> dict[nn.Parameter, list[FlatSlice]]:
        """What optimizers step that has elements on this rank: for others they keep nothing."""
        found: dict[nn.Parameter, list[FlatSlice]] = {}
        for piece in self.slices:
            if piece.count or not piece.is_view:
                found.setdefault(piece.holder, []).append(piece)
        return found

    def kept_size(self, piece: FlatSlice) -> int:
        """How many elements a tensor has that is kept for the holder of a piece."""
        return piece.count if piece.is_view else self.shard_size

    def rows(
        self, names: Collection[str], elements: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The rows that this rank has of values of the shapes of some pieces; `elements` are those
        that lie where its shard is. A collective of the group.
        """
        wanted = [piece for piece in self.slices if piece.name in names]
        if self.group is None:
            return {p.name: elements[p.name].as_strided(p.shape, p.stride) for p in wanted}
        size, rank = self.group.size(), self.group.rank()
        shard = torch.zeros(self.shard_size, dtype=dtype, device=self.device)
        for piece in wanted:
            if piece.count:
                shard[piece.at : piece.at + piece.count] = elements[piece.name]
        whole = of_all_ranks(shard, self.group)
        found = {}
        for piece in wanted:
            own = whole[piece.start : piece.start + piece.size]
            full = own.as_strided(piece.shape, piece.stride)
            # In host memory: a second copy of an optimizer's state may not fit beside the first.
            found[piece.name] = rows_of(full, rank, size).to("cpu", copy=True)
        return found

    def elements(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of values of which every rank has its rows, those elements that lie where this rank's
        shard is. A collective of the group.
        """
        wanted = [piece for piece in self.slices if piece.name in rows]
        if self.group is None:
            return {piece.name: piece.elements_of(rows[piece.name]) for piece in wanted}
        size = self.group.size()
        counts = [height(piece.shape[0], size) * math.prod(piece.shape[1:]) for piece in wanted]
        ends = list(accumulate(counts))
        dtype = next(iter(rows.values())).dtype
        mine = torch.zeros(ends[-1], dtype=dtype, device=self.device)
        for piece, count, end in zip(wanted, counts, ends, strict=True):
            own = rows[piece.name].reshape(-1)
            mine[end - count : end - count + own.numel()] = own
        everyone = of_all_ranks(mine, self.group).view(size, -1)
        found = {}
        for piece, count, end in zip(wanted, counts, ends, strict=True):
            rows_of_all = everyone[:, end - count : end].reshape(-1)[: piece.size]
            full = piece.elements_of(rows_of_all.view(piece.shape))
            found[piece.name] = full[piece.first : piece.first + piece.count]
        return found


def has_fsdp1(submodules: Sequence[nn.Module]) -> bool:
    """Whether FSDP1 wraps any of these."""
    # By the type, of which there are few.
    return any(issubclass(kind, FullyShardedDataParallel) for kind in set(map(type, submodules)))


def fsdp1_units(submodules: Sequence[nn.Module]) -> list[FullyShardedDataParallel]:
    """The modules that FSDP1 wraps: a module, which comes first, and all inside of it."""
    # Torch takes long over each module: it is asked only where there are such.
    return FullyShardedDataParallel.fsdp_modules(submodules[0]) if has_fsdp1(submodules) else []


def flats_of(module: nn.Module) -> list[Flat]:
    """The flat parameters of a module, in the same order on all ranks."""
    canonical = canonical_names(every_module(module))
    paths: dict[nn.Module, list[str]] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        paths.setdefault(each, []).append(path)

    def names(module: nn.Module, name: str) -> list[str]:
        return [canonical(f"{path}.{name}" if path else name) for path in paths[module]]

    joined: JoinedMeshes = {}
    units = FullyShardedDataParallel.fsdp_modules(module)
    return [_flat(unit, joined, names) for unit in units if unit._handle is not None]


def cut_further(
    spec: DTensorSpec, mesh: DeviceMesh, joined: JoinedMeshes, name: str = ""
) -> DTensorSpec:
    """How a DTensor lies when a mesh of FSDP1 has cut the rows that each rank has of it."""
    pair = mesh, spec.mesh
    if pair not in joined:
        try:
            joined[pair] = DeviceMesh._concatenate([shard_mesh(mesh), spec.mesh])
        except (RuntimeError, TypeError) as error:  # other ranks, or dims without names
            raise UnsupportedTypeError(
                "FSDP1 and tensor parallelism have meshes that are not of one",
                where=name,
                value=pair,
                hint="slice both from one: mesh = init_device_mesh(…, mesh_dim_names=…), "
                'mesh["fsdp"] and mesh["tp"]',
            ) from error
    pieces = spec.num_shards_map[0]
    rows = _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
    return DTensorSpec(joined[pair], (rows, *spec.placements), tensor_meta=spec.tensor_meta)


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dim of a mesh of FSDP1 along which it cuts: the last, where another repeats."""
    names = mesh.mesh_dim_names
    return mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]


class RowExtensions(DTensorExtensions):
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
        return spread_as(rows.clone(memory_format=torch.contiguous_format), spec)

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


def _flat(unit: Any, joined: JoinedMeshes, names: Callable[[nn.Module, str], list[str]]) -> Flat:
    handle = unit._handle
    parameter = handle.flat_param
    group = handle.process_group if handle.uses_sharded_strategy else None
    known = [names(info.module, info.param_name) for info in parameter._param_infos]
    for tied in parameter._shared_param_infos:
        first = names(tied.prim_module, tied.prim_param_name)[0]
        of = next(each for each in known if each[0] == first)
        of += [name for name in names(tied.module, tied.param_name) if name not in of]
    begins = accumulate(parameter._numels_with_padding, initial=0)
    pairs = zip(begins, parameter._is_padding_mask, strict=False)
    starts = [begin for begin, is_padding in pairs if not is_padding]
    views = parameter._params or [None] * len(known)
    cut = [each[0] for each, s in zip(known, parameter._param_extensions, strict=True) if s]
    if cut and group is None and parameter._params:
        raise UnsupportedTypeError(
            "FSDP1 with NO_SHARD and use_orig_params=True does not train DTensors",
            where=cut[0],
            hint="torch refuses its first forward pass; DistributedDataParallel goes around "
            "DTensors, and FULL_SHARD cuts them",
        )
    slices = []
    for (name, *also), shape, stride, spec, start, own, view in zip(
        known,
        parameter._shapes,
        parameter._strides,
        parameter._param_extensions,
        starts,
        parameter._shard_param_infos,
        views,
        strict=True,
    ):
        further = spec is not None and group is not None
        piece = FlatSlice(
            name=name,
            also=tuple(also),
            shape=tuple(shape),
            stride=tuple(stride),
            cut=cut_further(spec, unit._device_mesh, joined, name) if further else spec,
            start=start,
            first=own.intra_param_start_idx or 0,
            count=own.numel_in_shard or 0,
            at=own.offset_in_shard or 0,
            holder=parameter if view is None else view,
            is_view=view is not None,
        )
        slices.append(piece)
    shard_size = parameter._sharded_size.numel()
    return Flat(parameter, tuple(slices), group, handle.device, shard_size)


def of_all_ranks(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks of a group have, one after another."""
    found = mine.new_empty(mine.numel() * group.size())
    # As bytes: not every backend knows every dtype.
    all_gather_single(found.view(torch.uint8), mine.view(torch.uint8), group=group)
    return found


def height(rows: int, ranks: int) -> int:
    """How many rows each of some ranks has; the last may have fewer, or none."""
    return -(-rows // ranks)


def rows_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows that one of some ranks has."""
    each = height(whole.shape[0], ranks)
    return whole[rank * each : (rank + 1) * each]
