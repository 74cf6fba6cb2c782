"""Tensors that torch spreads over ranks, as their files tell it: DTensors with their mesh and
placements, ShardedTensors with the boxes of all ranks; and the strategy that all of them are of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

from ckptkit.errors import CkptkitError, FormatError
from ckptkit.foreign.extents import ForeignArray
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.model import (
    Axis,
    Box,
    Mesh,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    document,
    layout_of,
)

_KINDS = (
    ("tp", r"tp|tensor.*|model"),
    ("ddp", r"ddp|dp_replicate|replicate|replicas?|data_parallel_replicate"),
    ("fsdp", r"fsdp|dp|dp_shard.*|shard.*|data.*|dp_cp"),
    ("ep", r"ep|expert.*"),
)


@dataclass(frozen=True, slots=True)
class MeshPart:
    """How a tensor lies over a mesh: its whole shape, and which part this rank has."""

    shape: tuple[int, ...]
    box: Box | None
    """None where it has nothing."""
    mesh: tuple[tuple[str | None, int], ...] = ()
    """Names and sizes of the axes; nothing where only boxes are told."""
    placements: tuple[Placement, ...] = ()


def dtensor(
    spec: Any, rank: int, local: Sequence[int], where: str, tensor: Callable[[Any, str], Any]
) -> MeshPart:
    """What a DTensorSpec says, and which box of the tensor the local one of a rank is. `tensor`
    gives what a placeholder of a tensor stands for.
    """
    said = _fields(spec, "DTensorSpec", where)
    meta = said.get("tensor_meta")
    if not isinstance(meta, Placeholder) or meta.kind != "TensorMeta":
        raise FormatError("the DTensor does not say its shape", where=where)
    shape = meta.args[0] if meta.args else meta.fields().get("shape")
    whole = document.integers(shape, f"{where}: shape")
    mesh, coords = _mesh(said.get("mesh"), rank, where, tensor)
    placements = tuple(_placement(each, where) for each in said.get("placements") or ())
    if len(placements) != len(mesh):
        raise FormatError("the DTensor has not one placement for each axis", where=where)
    for placement in placements:
        if isinstance(placement, Shard | Strided) and placement.dim >= len(whole):
            raise FormatError("a placement cuts a dim that is not there", where=where)
    _check_order(said, [size for _, size in mesh], placements, where)
    axes = tuple(Axis(f"a{n}", "tp", size) for n, (_, size) in enumerate(mesh))
    strategy = Strategy(Mesh(axes))
    part = layout_of(whole, strategy, placements).part(strategy.mesh.rank(coords))
    box = part.boxes[0] if part.boxes else None
    fits = not math.prod(local) if box is None else box.shape == tuple(local)
    if len(part.boxes) > 1 or not fits:
        raise FormatError(
            f"the part of rank {rank} has the shape {tuple(local)}, "
            f"by its placements it has {part.shape}",
            where=where,
        )
    return MeshPart(whole, box, mesh, placements)


def _mesh(
    mesh: Any, rank: int, where: str, tensor: Callable[[Any, str], Any]
) -> tuple[tuple[tuple[str | None, int], ...], tuple[int, ...]]:
    """The axes of a DeviceMesh, and where on them a rank is."""
    said = _fields(mesh, "DeviceMesh", where)
    inner = tensor(said.get("mesh"), where)
    if isinstance(said.get("_layout"), Placeholder):
        layout = said["_layout"].fields()
        sizes = layout.get("shape", ())  # of torch 2.10 to 2.12, an int of one axis
        if "axes" in layout:
            sizes = [_fields(axis, "_FlatLayout", where).get("shape") for axis in layout["axes"]]
        shape = tuple(_size(size) for size in ((sizes,) if type(sizes) is int else sizes))
    else:  # before torch 2.10: the mesh is a tensor, whose shape alone counts
        shape = tuple(getattr(inner, "shape", ()))
    document.integers(shape, f"{where}: mesh", least=1, most=1 << 24)
    if not shape:
        raise FormatError("the DTensor does not say its mesh", where=where)
    names = said.get("_mesh_dim_names", said.get("mesh_dim_names")) or (None,) * len(shape)
    coords = said.get("_coordinate_on_dim")
    if coords is None:
        coords = []
        for size in reversed(shape):
            rank, coord = divmod(rank, size)
            coords.insert(0, coord)
    coords = document.integers(coords, f"{where}: mesh")
    if len(names) != len(shape) or len(coords) != len(shape):
        raise FormatError("the mesh of the DTensor has other names than axes", where=where)
    if any(coord >= size for coord, size in zip(coords, shape, strict=True)):
        raise FormatError("the rank is not on the mesh of the DTensor", where=where)
    return tuple((n if type(n) is str else None, s) for n, s in zip(names, shape, strict=True)), (
        coords
    )


def _check_order(
    said: Mapping[str, Any], sizes: Sequence[int], placements: Sequence[Placement], where: str
) -> None:
    """Refuse what cuts a dim in another order than the placements here do: the axes from left to
    right, but those that are strided after all others.
    """
    order = said.get("shard_order")
    for entry in order if isinstance(order, tuple) else ():
        axes = entry.args[1] if isinstance(entry, Placeholder) and len(entry.args) > 1 else ()
        strided = any(isinstance(placement, Strided) for placement in placements)
        if list(axes) != sorted(axes) and not strided:
            raise FormatError("axes cut a dim in an order that is not read here", where=where)
    for place, (placement, told) in enumerate(zip(placements, said["placements"], strict=True)):
        if isinstance(placement, Strided):
            factor = told.fields().get("split_factor", *told.args[1:2] or (None,))
            after = [
                size
                for size, other in zip(sizes[place + 1 :], placements[place + 1 :], strict=True)
                if isinstance(other, Shard | Strided) and other.dim == placement.dim
            ]
            if factor != math.prod(after):
                raise FormatError("a strided cut that is not read here", where=where, value=factor)


def _size(shape: Any) -> int:
    found = shape if isinstance(shape, tuple) else (shape,)
    return math.prod(each if type(each) is int else 0 for each in found)


def _placement(said: Any, where: str) -> Placement:
    kind = said.kind if isinstance(said, Placeholder) else ""
    if kind == "Replicate":
        return Replicate()
    if kind in ("Shard", "_StridedShard"):
        values = [*said.args, said.fields().get("dim")]
        dim = document.integer(values[0], f"{where}: placement")
        return Shard(dim) if kind == "Shard" else Strided(dim)
    raise FormatError(
        "a placement that is not read here",
        where=where,
        value=kind,
        hint="tensors that are partial sums have to be reduced before they are saved",
    )


def sharded_tensor(state: Any, where: str) -> tuple[tuple[int, ...], list[tuple[Box, Any]]]:
    """The shape of a ShardedTensor, and this rank's boxes of it, each with its tensor."""
    if not isinstance(state, tuple) or len(state) < 2:
        raise FormatError("not the state of a ShardedTensor", where=where)
    shards, metadata = state[0], _fields(state[1], "ShardedTensorMetadata", where)
    shape = document.integers(metadata.get("size"), f"{where}: size")
    found = []
    for shard in shards if isinstance(shards, list) else ():
        said = _fields(shard, "Shard", where)
        known = _fields(said.get("metadata"), "ShardMetadata", where)
        offsets = document.integers(known.get("shard_offsets"), f"{where}: offsets")
        sizes = document.integers(known.get("shard_sizes"), f"{where}: sizes")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise FormatError("a shard has other dims than the whole", where=where)
        found.append((Box(offsets, sizes), said.get("tensor")))
    return shape, found


def _fields(said: Any, kind: str, where: str) -> dict[str, Any]:
    """The attributes of a placeholder of a class."""
    if not isinstance(said, Placeholder) or said.kind != kind:
        raise FormatError(f"a {kind} was expected", where=where, value=type(said).__name__)
    return said.fields()


def strategy_of(
    spreads: Mapping[str, MeshPart], arrays: Sequence[ForeignArray], ranks: int
) -> tuple[Strategy | None, list[ForeignArray]]:
    """What wrote these arrays, where all of them have the mesh of all ranks or none; None where
    they do not. The arrays have a placement for each axis then.
    """
    meshes = {spread.mesh for spread in spreads.values() if spread.mesh}
    if not meshes:
        return by_boxes(arrays, ranks)
    mesh = next(iter(meshes))
    if len(meshes) > 1 or math.prod(size for _, size in mesh) != ranks:
        return None, list(arrays)
    axes: list[Axis] = []
    for place, (name, size) in enumerate(mesh):
        cuts = {spread.placements[place] for spread in spreads.values() if spread.mesh}
        axes.append(Axis(*_axis(name, cuts, axes), size))
    try:
        strategy = Strategy(Mesh(tuple(axes)))
    except CkptkitError:  # two axes that each shard the optimizer
        return None, list(arrays)
    whole = (Replicate(),) * len(axes)
    return strategy, [
        replace(a, placements=spreads[a.name].placements if a.name in spreads else whole)
        for a in arrays
    ]


def _axis(name: str | None, cuts: set[Placement], before: Sequence[Axis]) -> tuple[str, str]:
    """The name and the kind of an axis, by its name, or else by what it does."""
    spelled = (name or "").lower()
    kind = next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, spelled)), None)
    is_whole = all(isinstance(cut, Replicate) for cut in cuts)
    if kind is None or (is_whole and kind == "fsdp"):
        only_rows = all(cut.dim == 0 for cut in cuts if isinstance(cut, Shard | Strided))
        kind = "ddp" if is_whole else "fsdp" if only_rows else "tp"
    taken = {axis.name for axis in before}
    good = re.fullmatch(r"[a-z_][a-z0-9_]{0,63}", spelled) and spelled not in taken
    fallback = kind if kind not in taken else f"{kind}{len(before)}"
    return spelled if good else fallback, kind


def by_boxes(
    arrays: Sequence[ForeignArray], ranks: int
) -> tuple[Strategy | None, list[ForeignArray]]:
    """`fsdp:N`, where every array that is cut is cut as N ranks of it do; else None."""
    low, high = 1, 1 << 24
    cut: list[bool] = []
    for array in arrays:
        boxes = tuple(extent.box for extent in array.extents)
        rows = None if array.is_flat else _rows_of(array.shape, boxes)
        if rows is None:
            return None, list(arrays)
        cut.append(bool(array.shape) and rows < array.shape[0])
        if cut[-1]:
            low = max(low, -(-array.shape[0] // rows))
            high = min(high, high if rows == 1 else (array.shape[0] - 1) // (rows - 1))
    if low > high or not any(cut):
        return None, list(arrays)
    size = ranks if low <= ranks <= high else low
    return Strategy(Mesh((Axis("fsdp", "fsdp", size),))), [
        replace(array, placements=(Shard(0) if is_cut else Replicate(),))
        for array, is_cut in zip(arrays, cut, strict=True)
    ]


@cache
def _rows_of(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> int | None:
    """How many rows the pieces of an array have, all but the last; None where these are not pieces
    along the first dim.
    """
    if not shape or not math.prod(shape):
        return shape[0] if shape else 1
    pieces = sorted({box for box in boxes if not box.is_empty}, key=lambda box: box.offset)
    if not pieces or any(
        p.offset[1:] != (0,) * (len(shape) - 1) or p.shape[1:] != shape[1:] for p in pieces
    ):
        return None
    rows = pieces[0].shape[0]
    if len(pieces) != -(-shape[0] // rows):
        return None
    fits = all(p.offset[0] == rows * number for number, p in enumerate(pieces))
    fits = fits and all(p.shape[0] == min(rows, shape[0] - p.offset[0]) for p in pieces)
    return rows if fits else None


def by_ranks(
    shape: tuple[int, ...], boxes: Mapping[int, Sequence[Box]], world: int
) -> MeshPart | None:
    """How a tensor lies over all ranks in a row, if each has what it has of a tensor that is cut
    along one dim.
    """
    hulls = []
    for rank, each in boxes.items():
        begin = tuple(min(along) for along in zip(*(box.offset for box in each), strict=True))
        end = tuple(max(along) for along in zip(*(box.stop for box in each), strict=True))
        hulls.append((rank, Box(begin, tuple(b - a for a, b in zip(begin, end, strict=True)))))
    return _in_a_row(shape, tuple(hulls), world)


@cache
def _in_a_row(
    shape: tuple[int, ...], hulls: tuple[tuple[int, Box], ...], world: int
) -> MeshPart | None:
    strategy = Strategy(Mesh((Axis("a", "tp", world),)))
    of_rank = dict(hulls)
    for dim in range(len(shape)):
        layout = layout_of(shape, strategy, (Shard(dim),))
        if all(
            layout.part(r).boxes[:1] == ((of_rank[r],) if r in of_rank else ())
            for r in range(world)
        ):
            return MeshPart(shape, None, ((None, world),), (Shard(dim),))
    return None


def by_places(places: Sequence[Mapping[str, tuple[int, int]]]) -> Strategy | None:
    """The strategy of ranks that each say where they are along some axes, and how long those are,
    whatever order of the axes has numbered the ranks; None where none has.
    """
    sizes = {name: size for name, (_, size) in places[0].items() if size > 1}
    if math.prod(sizes.values()) != len(places):
        return None
    for order in permutations(sizes):
        axes = (Axis(n, n if n in ("pp", "tp", "ep") else "ddp", sizes[n]) for n in order)
        mesh = Mesh(tuple(axes))
        told = [tuple(place[name][0] for name in order) for place in places]
        if told == [mesh.coords(rank) for rank in range(len(places))]:
            return Strategy(mesh)
    return None


def placed_by_writers(
    arrays: Sequence[ForeignArray], strategy: Strategy, rank_of: Callable[[str], int]
) -> list[ForeignArray]:
    """The arrays with their placements, as far as their boxes tell them, and who has written these:
    any of the ranks of data parallelism may have. `rank_of` says it of the file of an extent.
    """
    mesh = strategy.mesh
    found: list[ForeignArray] = []
    for array in arrays:
        coords = {mesh.coords(rank_of(extent.file)) for extent in array.extents}
        boxes = frozenset(extent.box for extent in array.extents)
        row: list[Placement] = []
        for number, axis in enumerate(mesh.axes):
            there = {each[number] for each in coords}
            is_expert = axis.kind == "ep" and ".experts." in array.name
            if axis.kind == "tp" and not array.is_flat:
                row.append(_cut(array.shape, boxes, axis.size))
            elif len(there) == 1 and (axis.kind == "pp" or is_expert):
                row.append(Owner(*there) if is_expert else Stage(*there))
            else:
                row.append(Replicate())
        found.append(replace(array, placements=tuple(row)))
    return found


@cache
def _cut(shape: tuple[int, ...], boxes: frozenset[Box], size: int) -> Placement:
    """The cut into so many parts that gives these boxes; of gated layers it cuts each half."""
    cuts: list[Placement] = [Shard(dim) for dim in range(len(shape))]
    if shape and shape[0] and not shape[0] % 2:
        cuts.append(Shard(0, blocks=(shape[0] // 2,) * 2))
    for cut in cuts:
        layout = layout_of(shape, Strategy.of(f"tp:{size}"), (cut,))
        if boxes == {box for rank in range(size) for box in layout.part(rank).boxes}:
            return cut
    return Replicate()
