"""Snapshots of torchsnapshot: a document that lists every value of every rank, and a file for each
tensor or object, or for many small tensors.

Tensors are raw elements in C order, or files of torch.save where numpy has no such type. What a
path means differs: a replicated value is listed for rank 0 alone, of a sharded tensor each rank
lists its shards, and all else is what one rank has for itself.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from ckptkit.errors import CkptkitError, FormatError
from ckptkit.foreign.extents import Extent, ForeignArray, ForeignStep
from ckptkit.foreign.folder import Folder, Place, parsed, read_places, read_yaml
from ckptkit.foreign.readers.safetensors import whole_of
from ckptkit.foreign.spread import MeshPart, by_ranks, strategy_of
from ckptkit.foreign.states import StateTensor, reason, states_of, step_counted
from ckptkit.foreign.torch_file import dtype_of, is_whole, read_file
from ckptkit.format.names import join
from ckptkit.model import Box, DType, Placement, Replicate, Shard, Strategy, document

_METADATA = ".snapshot_metadata"
_PATH = re.compile(r"(\d{1,8})/([^/]+(?:/[^/]+)*)")
_MOST_RANKS = 1 << 24
_MOST_LEVELS = 64
_MOST_OBJECT_BYTES = 1 << 28
_CONTAINERS = ("list", "dict", "OrderedDict")
_PLAIN = ("int", "str", "bool", "bytes", "float")
_WHOLE = ("Tensor", "ChunkedTensor")
_CUT = ("ShardedTensor", "DTensor")
_GONE = object()


def read_torchsnapshot(folder: Folder) -> ForeignStep:
    """The snapshot in a folder."""
    world, entries = _read_metadata(folder)
    snapshot = _Snapshot(folder, world, entries)
    tree = {
        unquote(name): value
        for name in snapshot.below.get("", ())
        if (value := snapshot.value(name)) is not _GONE
    }
    found = states_of(tree, str(folder.store.location))
    for path, rank, tensor in snapshot.of_ranks:
        nodes = [unquote(node) for node in path.split("/")]
        name = join("other", *nodes, f"rank.{rank}")
        found.theirs[name] = f"{rank}/{path}"
        found.arrays.append(ForeignArray(name, tensor.shape, tensor.dtype, tensor.extents, "other"))
    found.left_out |= snapshot.left_out
    listed = [entry for of_ranks in entries.values() for entry in of_ranks.values()]
    tensors = [tensor for entry in listed for tensor in _tensors_of(entry)]
    _check_slabs(folder, tensors)
    known = {str(tensor.get("location")) for tensor in tensors}
    lost = (key for key in folder.files if key.startswith("sharded/") and key not in known)
    found.left_out |= dict.fromkeys(lost, "a file that no entry names")
    strategy, arrays = snapshot.strategy(found.arrays)
    told = {"of_each_rank": sorted({path.partition("/")[0] for path, _, _ in snapshot.of_ranks})}
    told["of_rank_0"] = sorted(snapshot.differing)
    return found.step(
        "torchsnapshot",
        folder,
        snapshot.files,
        arrays=arrays,
        strategy=strategy,
        details={key: value for key, value in told.items() if value},
        step=step_counted(tree),
    )


def _read_metadata(folder: Folder) -> tuple[int, dict[str, dict[int, dict[str, Any]]]]:
    """How many ranks there were, and by path and rank what each of them has."""
    where = folder.where(_METADATA)
    if _METADATA not in folder.files:
        raise FormatError(
            "the metadata of the snapshot is missing",
            where=where,
            hint="a snapshot that was interrupted has none, and a copy by `cp *` neither; copy the "
            "folder itself, or use another",
        )
    data = folder.read(_METADATA)
    # Until it was found to be slow, it was YAML, of which JSON is a part.
    said = parsed(data, where) if data.lstrip()[:1] == b"{" else read_yaml(data, where)
    if not isinstance(said, dict) or not isinstance(said.get("manifest"), dict):
        raise FormatError("not the metadata of torchsnapshot", where=where)
    world = document.integer(
        said.get("world_size"), f"{where}: world_size", least=1, most=_MOST_RANKS
    )
    entries: dict[str, dict[int, dict[str, Any]]] = {}
    for name, entry in said["manifest"].items():
        match = _PATH.fullmatch(document.text(name, where))
        if match is None or int(match[1]) >= world or match[2].count("/") > _MOST_LEVELS:
            raise FormatError("not a path of a rank", where=where, value=name)
        if not isinstance(entry, dict):
            raise FormatError("must be a map", where=f"{where}: {name}", value=entry)
        entries.setdefault(match[2], {})[int(match[1])] = entry
    ranks = {rank for of_ranks in entries.values() for rank in of_ranks}
    entry_of = [entry for of_ranks in entries.values() for entry in of_ranks.values()]
    is_cut = any(entry.get("type") == "ShardedTensor" for entry in entry_of)
    # Each rank lists at least the dictionaries that it has.
    if is_cut and len(ranks) < world:
        raise FormatError(
            f"of {world} ranks it has entries of {len(ranks)}",
            where=where,
            hint="it was cut short or changed; copy it again",
        )
    return world, entries


def _tensors_of(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tensors of an entry, each in one file."""
    if entry.get("type") == "Tensor":
        yield entry
    for key in ("shards", "chunks"):
        parts = entry.get(key)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(tensor := part.get("tensor"), dict):
                yield tensor


def _check_slabs(folder: Folder, tensors: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a file of many tensors of which some are in no entry. The shape of a sharded tensor is
    told nowhere: without its last shards it would be a smaller one.
    """
    ranges: dict[str, set[tuple[int, int]]] = {}
    for tensor in tensors:
        key, said = tensor.get("location"), tensor.get("byte_range")
        if type(key) is str and isinstance(said, list) and [*map(type, said)] == [int, int]:
            ranges.setdefault(key, set()).add((said[0], said[1]))
    for key, there in ranges.items():
        ends = [(0, 0), *sorted(there), (folder.size(key),) * 2]
        for (_, end), (begin, _) in pairwise(ends):
            if begin > end:
                raise FormatError(
                    f"no entry has the bytes {end} to {begin} of the file",
                    where=folder.where(key),
                    hint="the metadata lost some of a tensor, or the file is of another snapshot; "
                    "copy the folder again",
                )


class _Snapshot:
    """Makes a tree of what all ranks list."""

    def __init__(
        self, folder: Folder, world: int, entries: dict[str, dict[int, dict[str, Any]]]
    ) -> None:
        self.folder = folder
        self.world = world
        self.entries = entries
        self.below: dict[str, dict[str, None]] = {}
        """By the path of a container, the last nodes of the paths in it."""
        for path in entries:
            at = path
            while at:
                above, _, node = at.rpartition("/")
                self.below.setdefault(above, {})[node] = None
                at = above
        self.files: dict[str, None] = {}
        self.spreads: dict[tuple[Extent, ...], MeshPart | None] = {}
        """Of tensors that are cut; None where the way is not known."""
        self.is_replicated = False
        """Whether any tensor is."""
        self.of_ranks: list[tuple[str, int, StateTensor]] = []
        """Tensors that several ranks have, each its own."""
        self.alike = self._alike()
        self.differing: set[str] = set()
        self.left_out: dict[str, str] = {}

    def _alike(self) -> set[str]:
        """Paths of tensors of one element that several ranks have, the same: of an optimizer each
        rank counts the steps. Larger ones would be more to read than metadata is.
        """
        paths: list[str] = []
        places: list[Place] = []
        for path, of_ranks in self.entries.items():
            if len(of_ranks) == 1 or not all(map(_is_number, of_ranks.values())):
                continue
            for entry in of_ranks.values():
                (extent,) = (tensor := self._whole(path, entry)).extents
                paths.append(path)
                places.append(Place(extent.file, extent.offset, tensor.dtype.itemsize))
        contents: dict[str, set[bytes]] = {}
        for path, data in zip(paths, read_places(self.folder, places), strict=True):
            contents.setdefault(path, set()).add(data)
        return {path for path, each in contents.items() if len(each) == 1}

    def where(self, path: str) -> str:
        return f"{self.folder.where(_METADATA)}: {path}"

    def value(self, path: str) -> Any:
        """What is at a path: a tree, a tensor or a plain value; _GONE for what is not in it."""
        of_ranks = self.entries.get(path, {})
        kinds = {document.text(e.get("type"), self.where(path)) for e in of_ranks.values()}
        if kinds and kinds <= {"dict", "OrderedDict"}:
            return self._dict(path, of_ranks.values())
        if kinds == {"list"}:
            return self._list(path)
        if path in self.below or (len(kinds) > 1 and kinds & {*_CONTAINERS, *_CUT}):
            raise FormatError(
                "values are in it, and it is not told to be a dict or a list"
                if path in self.below
                else "ranks have values of different kinds",
                where=self.where(path),
                value=sorted(kinds),
            )
        first = of_ranks[min(of_ranks)]
        if kinds <= {*_CUT}:
            return self._cut(path, of_ranks)
        if kinds <= {*_WHOLE}:
            self.is_replicated |= (is_replicated := first.get("replicated") is True)
            if is_replicated or len(of_ranks) == 1:
                return self._whole(path, first)
            tensors = {rank: self._whole(path, entry) for rank, entry in of_ranks.items()}
            if path in self.alike:
                return tensors[min(tensors)]
            self.of_ranks += [(path, rank, tensor) for rank, tensor in tensors.items()]
            return _GONE
        if kinds <= {*_PLAIN}:
            if any(
                entry.get("serialized_value") != first.get("serialized_value")
                for entry in of_ranks.values()
            ):
                self.differing.add(path)
            return _plain(first, self.where(path))
        if kinds == {"object"}:
            if len(of_ranks) > 1:
                self.differing.add(path)
            return self._object(path, first)
        raise FormatError(
            "an entry of a kind that is not read here",
            where=self.where(path),
            value=sorted(kinds),
            hint="restore it with torchsnapshot, and save it again",
        )

    def _dict(self, path: str, of_ranks: Iterable[Mapping[str, Any]]) -> dict[Any, Any]:
        keys: dict[str, str | int] = {}
        for entry in of_ranks:
            said = entry.get("keys")
            if not isinstance(said, list) or not all(isinstance(k, str | int) for k in said):
                raise FormatError("not the keys of a dict", where=self.where(path))
            keys |= {str(key): key if type(key) is int else str(key) for key in said}
        there = {unquote(node): node for node in self.below.get(path, ())}
        if there.keys() != keys.keys():
            raise FormatError(
                "the entries in a dict are not those of its keys",
                where=self.where(path),
                value=sorted(there.keys() ^ keys.keys())[:8],
                hint="the metadata was changed; copy it again",
            )
        return {
            key: value
            for text, key in keys.items()
            if (value := self.value(f"{path}/{there[text]}")) is not _GONE
        }

    def _list(self, path: str) -> list[Any]:
        nodes = list(self.below.get(path, ()))
        if sorted(nodes, key=lambda node: (len(node), node)) != [*map(str, range(len(nodes)))]:
            raise FormatError(
                "an item of a list is missing",
                where=self.where(path),
                hint="the metadata was changed; copy it again",
            )
        values = [self.value(f"{path}/{number}") for number in range(len(nodes))]
        return [value for value in values if value is not _GONE]

    def _whole(self, path: str, entry: Mapping[str, Any]) -> StateTensor:
        """A tensor that no rank has a part of, in one file or in chunks."""
        where = self.where(path)
        shape = document.integers(entry.get("shape"), f"{where}: shape")
        dtype = dtype_of(entry.get("dtype"), f"{where}: dtype")
        if entry["type"] == "Tensor":
            return StateTensor(shape, dtype, (self._extent(entry, Box.whole(shape), dtype, where),))
        shards = self._shards(entry.get("chunks"), where)
        if not shape:  # cut as a row of one
            shards = [(Box.whole(()), tensor) for box, tensor in shards if box.shape == (1,)]
        return StateTensor(shape, dtype, self._extents(shards, dtype, where))

    def _cut(self, path: str, of_ranks: Mapping[int, Mapping[str, Any]]) -> Any:
        """A tensor of which ranks have parts."""
        where = self.where(path)
        for rank in range(self.world if len(of_ranks) < self.world else 0):
            if rank not in of_ranks and self._lists(rank, path):
                raise FormatError(
                    f"rank {rank} has no entry of it, though it has a part of the tensor",
                    where=self.where(path),
                    value=f"{rank}/{path}",
                    hint="the metadata was cut short or changed; copy it again",
                )
        by_rank = {rank: self._shards(e.get("shards"), where) for rank, e in of_ranks.items()}
        shards = [shard for rank in sorted(by_rank) for shard in by_rank[rank]]
        if not shards:
            self.left_out[path] = "a tensor of which no rank has a part"
            return _GONE
        shape = whole_of([box for box, _ in shards], where)  # as torchsnapshot has it
        dtype = dtype_of(shards[0][1].get("dtype"), f"{where}: dtype")
        extents = self._extents(shards, dtype, where)
        first = next(iter(of_ranks.values()))
        if first["type"] == "DTensor":
            spread = _meshed(shape, first, where)
        else:
            boxes = {rank: [box for box, _ in parts] for rank, parts in by_rank.items() if parts}
            spread = by_ranks(shape, boxes, self.world)
        self.spreads[extents] = spread
        return StateTensor(shape, dtype, extents)

    def _lists(self, rank: int, path: str) -> bool:
        """Whether a rank has a value by what it lists of what that is in: a stage of a pipeline has
        only some.
        """
        above, _, node = path.rpartition("/")
        entry = self.entries.get(above, {}).get(rank)
        if above and entry is None:
            return self._lists(rank, above)
        keys = (entry or {}).get("keys")
        return not isinstance(keys, list) or unquote(node) in map(str, keys)

    def _shards(self, said: Any, where: str) -> list[tuple[Box, dict[str, Any]]]:
        found = []
        for shard in said if isinstance(said, list) else [None]:
            known = document.fields(shard, where, ("offsets", "sizes", "tensor"))
            offsets = document.integers(known["offsets"], f"{where}: offsets")
            sizes = document.integers(known["sizes"], f"{where}: sizes")
            tensor = known["tensor"]
            if len(offsets) != len(sizes) or not isinstance(tensor, dict):
                raise FormatError("not a shard of a tensor", where=where)
            found.append((Box(offsets, sizes), tensor))
        return found

    def _extents(
        self, shards: Sequence[tuple[Box, dict[str, Any]]], dtype: DType, where: str
    ) -> tuple[Extent, ...]:
        for _, tensor in shards:
            if dtype_of(tensor.get("dtype"), f"{where}: dtype") != dtype:
                raise FormatError("its parts have several dtypes", where=where)
        # Where ranks have the same part, that of the first is it.
        unique = dict(reversed(shards))
        return tuple(self._extent(unique[box], box, dtype, where) for box in unique)

    def _extent(self, entry: Mapping[str, Any], box: Box, dtype: DType, where: str) -> Extent:
        """Where the elements of a box are."""
        key = document.text(entry.get("location"), f"{where}: location")
        size = self.folder.size(key)
        self.files[key] = None
        shape = document.integers(entry.get("shape"), f"{where}: shape")
        if shape != box.shape and (shape, box.shape) != ((1,), ()):
            raise FormatError(f"a part of {box.shape} is said to be of {shape}", where=where)
        serializer, said = entry.get("serializer"), entry.get("byte_range")
        if serializer == "torch_save" and said is None:
            tensor = read_file(self.folder, key).tree
            if (
                not isinstance(tensor, StateTensor)
                or tensor.dtype != dtype
                or tensor.shape != shape
            ):
                raise FormatError(
                    f"the file does not hold the {dtype} of {shape} that it should",
                    where=self.folder.where(key),
                )
            return replace(tensor.extents[0], box=box)
        if serializer != "buffer_protocol":
            raise FormatError(
                "a tensor that was written in a way that is not read here",
                where=where,
                value=serializer,
            )
        nbytes = box.size * dtype.itemsize
        begin, end = 0, size
        if said is not None:
            ends = document.integers(said, f"{where}: byte_range")
            begin, end = ends if len(ends) == 2 else (1, 0)
        if end - begin != nbytes or end > size:
            hint = "the file was cut short or changed; copy it again"
            if dtype.name == "bfloat16" and box.size % 2 and end - begin == nbytes - 2:
                hint = "torchsnapshot writes an odd number of bfloat16 without the last: it is lost"
            raise FormatError(
                f"{nbytes} bytes are wanted at {begin}, and the file has {size}",
                where=f"{self.folder.where(key)}: {where.rpartition(': ')[2]}",
                value=[begin, end],
                hint=hint,
            )
        return Extent(box, key, begin)

    def _object(self, path: str, entry: Mapping[str, Any]) -> Any:
        """An object; _GONE, and named as left out, where it is one of a class."""
        key = document.text(entry.get("location"), f"{self.where(path)}: location")
        if self.folder.size(key) > _MOST_OBJECT_BYTES:
            self.left_out[path] = f"an object of {self.folder.size(key)} bytes"
            return _GONE
        try:
            value = read_file(self.folder, key).tree
        except CkptkitError as error:
            if not is_whole(self.folder.read(key)):
                raise
            self.left_out[path] = reason(error)
            return _GONE
        self.files[key] = None
        return value

    def strategy(
        self, arrays: Sequence[ForeignArray]
    ) -> tuple[Strategy | None, list[ForeignArray]]:
        """What wrote it: known where every tensor is replicated, or cut in a known way."""
        if self.world == 1:
            return Strategy.of("single"), list(arrays)
        cut = {it.name: self.spreads[it.extents] for it in arrays if it.extents in self.spreads}
        spreads = {name: spread for name, spread in cut.items() if spread is not None}
        apart = self.alike | {path for path, _, _ in self.of_ranks}
        alone = [
            path
            for path, of_ranks in self.entries.items()
            for entry in of_ranks.values()
            if entry.get("type") in _WHOLE and entry.get("replicated") is not True
            if path not in apart
        ]
        if len(spreads) < len(cut) or alone or not (self.spreads or self.is_replicated):
            return None, list(arrays)
        line = ((None, self.world),)
        if not any(spread.mesh for spread in spreads.values()):
            spreads = {a.name: MeshPart(a.shape, None, line, (Replicate(),)) for a in arrays}
        return strategy_of(spreads, arrays, self.world)


def _is_number(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is a tensor of one element that a rank has for itself."""
    shape = entry.get("shape")
    is_one = isinstance(shape, list) and all(type(n) is int and n == 1 for n in shape)
    is_raw = entry.get("type") == "Tensor" and entry.get("serializer") == "buffer_protocol"
    return is_one and is_raw and entry.get("replicated") is not True


def _plain(entry: Mapping[str, Any], where: str) -> Any:
    """The value that is in the metadata itself."""
    kind, said = entry["type"], document.text(entry.get("serialized_value"), where)
    try:
        if kind == "str":
            return said
        if kind == "int":
            return int(said)
        if kind == "bool":
            return {"True": True, "False": False}[said]
        raw = base64.b64decode(said, validate=True)
        return raw if kind == "bytes" else struct.unpack("<d", raw)[0]
    except (ValueError, KeyError, binascii.Error, struct.error) as error:
        raise FormatError(f"not what torchsnapshot writes of a {kind}", where=where) from error


def _meshed(shape: tuple[int, ...], entry: Mapping[str, Any], where: str) -> MeshPart | None:
    """What a DTensor says of its mesh; nothing where axes cut one dim twice, whose order is not
    told.
    """
    sizes: list[int] = []
    mesh = entry.get("mesh")
    while isinstance(mesh, list) and mesh and len(sizes) < _MOST_LEVELS:
        sizes.append(len(mesh))
        mesh = mesh[0]
    cuts = entry.get("dim_map")
    if not isinstance(cuts, list) or len(cuts) != len(shape):
        raise FormatError("not how a DTensor lies over its mesh", where=where)
    placements: list[Placement] = [Replicate()] * len(sizes)
    for dim, said in enumerate(cuts):
        axes = document.integers(said, f"{where}: dim_map", least=-1, most=len(sizes) - 1)
        if len(axes) > 1:
            return None
        for axis in axes:
            if axis >= 0:
                placements[axis] = Shard(dim)
    return MeshPart(shape, None, tuple((None, size) for size in sizes), tuple(placements))
