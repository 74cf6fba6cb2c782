"""Files of torch.save: a zip file with a pickle, and in it one member for each storage; one such
file, those of a model with their index, or those of all ranks of a job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent, ForeignStep, span_of
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.globals import DTYPES, STORAGES, Global
from ckptkit.foreign.pickles import Placeholder, read_pickle
from ckptkit.foreign.safetensors import config_of, parsed
from ckptkit.foreign.spread import MeshPart, dtensor, sharded_tensor, strategy_of
from ckptkit.foreign.states import Path, States, StateTensor, states_of
from ckptkit.foreign.zips import directory_of, offsets_of
from ckptkit.model import Box, DType, document

INDEX = ".bin.index.json"
_RANK = re.compile(
    r"(?P<what>.*?)_?(?:world_size_(?P<size>\d+)_)?rank_?(?P<rank>\d+)\.(?:pt|bin|pth)"
)
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_MODELS = ("pytorch_model", "model", "consolidated", "consolidated.00", "adapter_model")
_OPTIMIZERS = ("optimizer", "optim")
# A tensor whose elements are the same many times over may have so many bytes.
_MOST_REPEATED = 64 << 20


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of a file, before anybody knows where it is."""

    key: str
    dtype: str
    count: int


@dataclass(slots=True)
class TorchFile:
    """What is in one file: the value of its pickle, whose tensors are `StateTensor`."""

    tree: Any
    spreads: dict[int, MeshPart] = field(default_factory=dict)
    """How its DTensors lie over a mesh, by the identity of the tensor in the tree."""


def read_torch(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder, or in its one file."""
    if folder.only is not None and not folder.only.endswith(INDEX):
        return _one(folder, {folder.only: None})
    names = [key for key in folder.files if "/" not in key]
    indexes = [key for key in names if key.endswith(INDEX)]
    if folder.only is not None:
        indexes = [folder.only]
    if len(indexes) == 1:
        return _one(folder, _indexed(folder, indexes[0]))
    ranks = {key: match for key in names if (match := _RANK.fullmatch(key))}
    if ranks:
        return _of_ranks(folder, ranks)
    files = [key for key in names if key.endswith(_ENDINGS)]
    if len(files) > 1:
        by_stem = {key.rpartition(".")[0]: key for key in files}
        models = [by_stem[stem] for stem in _MODELS if stem in by_stem][:1]
        more = [by_stem[stem] for stem in _OPTIMIZERS if stem in by_stem][:1]
        if not models:
            raise FormatError(
                "several files of torch.save are in the folder",
                where=str(folder.store.location),
                value=sorted(files)[:20],
                hint=f"name the one that counts, such as {folder.where(min(files))}",
            )
        return _one(folder, dict.fromkeys([*models, *more]))
    return _one(folder, dict.fromkeys(files))


def _indexed(folder: Folder, index: str) -> dict[str, set[str] | None]:
    """The files of an index, each with the names that count in it."""
    where = folder.where(index)
    found = parsed(folder.read(index), where)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        raise FormatError("the index has no weight_map", where=where)
    files: dict[str, set[str] | None] = {}
    for name, key in names.items():
        document.text(key, f"{where}: {name}")
        if key not in folder.files or "/" in key:
            raise FormatError(
                "a file of the index is missing",
                where=where,
                value=key,
                hint="it was not copied along; copy the folder again",
            )
        counted = files.setdefault(key, set())
        if counted is not None:
            counted.add(name)
    return files


def _one(folder: Folder, files: Mapping[str, set[str] | None]) -> ForeignStep:
    """The step of files that are one state dictionary together."""
    tree: dict[Any, Any] = {}
    for key, names in files.items():
        value = read_file(folder, key).tree
        if not isinstance(value, dict):
            value = {"value": value}
        if names is not None:
            missing = sorted(names - value.keys())
            if missing:
                raise FormatError(
                    "a tensor of the index is not in the file that it names",
                    where=folder.where(key),
                    value=missing[0],
                )
            value = {name: value[name] for name in value if name in names}
        stem = key.rpartition(".")[0]
        if len(files) > 1 and names is None:
            value = {"optimizer" if stem in _OPTIMIZERS else "model": value}
        if tree.keys() & value.keys():
            raise FormatError("a tensor is in several files", where=folder.where(key))
        tree |= value
    found = states_of(tree, str(folder.store.location))
    return _step(folder, files, found, counted(tree))


def _step(
    folder: Folder, files: Iterable[str], found: States, number: int, **more: Any
) -> ForeignStep:
    return ForeignStep(
        format="torch.save",
        files={key: folder.size(key) for key in files},
        arrays=more.pop("arrays", found.arrays),
        aliases=found.aliases,
        objects=found.objects,
        theirs=found.theirs,
        details=found.details,
        sizes=config_of(folder),
        step=number,
        **more,
    )


def counted(tree: Mapping[Any, Any]) -> int:
    """The number of the step, where the file says it."""
    for key in ("global_step", "step", "iteration"):
        value = tree.get(key)
        if type(value) is int and 0 <= value < 1 << 53:
            return value
    return 0


def _of_ranks(folder: Folder, ranks: Mapping[str, re.Match[str]]) -> ForeignStep:
    """The step of files of which each rank of a job wrote one, or one of each kind."""
    kinds: dict[str, dict[int, str]] = {}
    for key, match in ranks.items():
        kinds.setdefault(match["what"], {})[int(match["rank"])] = key
    world = max(len(files) for files in kinds.values())
    said = {int(match["size"]) for match in ranks.values() if match["size"]}
    if said and said != {world}:
        _incomplete(folder, max(said), kinds)
    trees: list[dict[Any, Any]] = [{} for _ in range(world)]
    spreads: dict[int, MeshPart] = {}
    for what, files in kinds.items():
        if sorted(files) != list(range(world)):
            _incomplete(folder, world, kinds)
        for rank, key in files.items():
            part = read_file(folder, key, rank)
            spreads |= part.spreads
            tree = part.tree if isinstance(part.tree, dict) else {"value": part.tree}
            is_optimizer = what.startswith(_OPTIMIZERS) and "state" in tree
            is_extra = what.startswith(("extra", "rng", "random"))
            name = "optimizer" if is_optimizer else what if is_extra else "model"
            nested = name if not is_extra and not (tree.keys() & {"model", "optimizer"}) else None
            trees[rank] |= {nested: tree} if nested else tree if not is_extra else {what: tree}
    merged = _Merge(spreads, str(folder.store.location))
    tree = merged.merge(trees, ())
    found = states_of(tree, str(folder.store.location))
    by_name: dict[str, MeshPart] = {}
    for array in found.arrays:
        if array.extents and (spread := merged.spreads.get(array.extents)):
            by_name[array.name] = spread
    strategy, arrays = strategy_of(by_name, found.arrays, world)
    step = _step(folder, ranks, found, counted(tree), arrays=arrays, strategy=strategy)
    differing = {"of_rank_0": sorted(merged.differing)} if merged.differing else {}
    return replace(step, details={**step.details, **differing})


def _incomplete(folder: Folder, world: int, kinds: Mapping[str, Mapping[int, str]]) -> None:
    short = {what: files for what, files in kinds.items() if sorted(files) != list(range(world))}
    what, files = next(iter(short.items()), ("", {}))
    missing = sorted(set(range(world)) - files.keys())
    raise FormatError(
        f"the files of {world} ranks belong together, "
        f"of {what or 'them'} {len(missing)} are missing",
        where=str(folder.store.location),
        value=[f"rank {rank}" for rank in missing[:8]],
        hint="copy the files of all ranks into one folder",
    )


class _Merge:
    """Trees of all ranks made one: of a tensor the parts of all, of a value that of rank 0."""

    def __init__(self, of_tensors: Mapping[int, MeshPart], where: str) -> None:
        self._of_tensors = of_tensors
        self._where = where
        self.spreads: dict[tuple[Extent, ...], MeshPart] = {}
        self.differing: set[str] = set()
        """Paths of values that are not the same on all ranks."""

    def merge(self, trees: Sequence[Any], path: Path) -> Any:
        first = trees[0]
        if isinstance(first, dict) and all(isinstance(tree, dict) for tree in trees):
            keys = list(dict.fromkeys(key for tree in trees for key in tree))
            return {
                key: self.merge([tree[key] for tree in trees if key in tree], (*path, key))
                for key in keys
            }
        if isinstance(first, list) and all(type(t) is list and len(t) == len(first) for t in trees):
            return [self.merge([tree[n] for tree in trees], (*path, n)) for n in range(len(first))]
        tensors = [tree for tree in trees if isinstance(tree, StateTensor)]
        if tensors:
            return self._tensor(tensors, path)
        if any(repr(tree) != repr(first) for tree in trees[1:]):
            self.differing.add(".".join(map(str, path)))
        return first

    def _tensor(self, parts: Sequence[StateTensor], path: Path) -> StateTensor:
        first = parts[0]
        if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
            raise FormatError(
                "the ranks' tensors are of different shapes or types, and do not say how they "
                "belong together",
                where=f"{self._where}: {'.'.join(map(str, path))}",
                value=sorted({str(part.shape) for part in parts}),
            )
        extents = tuple(extent for part in parts for extent in part.extents)
        whole = Box.whole(first.shape)
        if extents and all(extent.box == whole for extent in extents):
            extents = extents[:1]  # a replica on each rank
        merged = replace(first, extents=extents)
        spread = self._of_tensors.get(id(first))
        if spread is not None:
            self.spreads[extents] = spread
        return merged


def read_file(folder: Folder, key: str, rank: int = 0) -> TorchFile:
    """What is in one file, its tensors with where they are."""
    where = folder.where(key)
    head = folder.read(key, 0, min(4, folder.size(key)))
    if head != b"PK\3\4":
        old = head[:1] == b"\x80"
        raise FormatError(
            "the file is not a zip file" + (", but what torch before 1.6 wrote" if old else ""),
            where=where,
            hint="load it with torch, and save it again" if old else "it was cut short or changed",
        )
    members = directory_of(folder, key)
    pickles = [name for name in members if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(pickles) != 1:
        raise FormatError("the zip file is not one of torch.save: no data.pkl", where=where)
    top = pickles[0].partition("/")[0]
    if f"{top}/constants.pkl" in members or any(n.startswith(f"{top}/code/") for n in members):
        raise FormatError(
            "the file is a TorchScript program",
            where=where,
            hint="save the state_dict() of the module instead",
        )
    small = [members[name] for name in (pickles[0], f"{top}/byteorder") if name in members]
    starts = offsets_of(folder, key, small)
    if f"{top}/byteorder" in starts:
        order = folder.read(key, starts[f"{top}/byteorder"], members[f"{top}/byteorder"].size)
        if order != b"little":
            raise FormatError("its numbers are big-endian", where=where, value=order[:20])
    data = folder.read(key, starts[pickles[0]], members[pickles[0]].size)
    storages: dict[str, Storage] = {}

    def persistent(said: Any) -> Storage:
        storage = storage_of(said, where)
        known = storages.setdefault(storage.key, storage)
        size = DType.of(storage.dtype).itemsize * storage.count
        member = members.get(f"{top}/data/{storage.key}")
        if member is None or member.size != size:
            raise FormatError(
                f"a storage of {size} bytes has "
                + ("no member in the file" if member is None else f"{member.size} bytes"),
                where=where,
                value=storage.key[:40],
                hint="the file was cut short or changed; copy it again",
            )
        return storage if known.dtype != storage.dtype else known

    value = read_pickle(data, where, persistent)
    offsets = offsets_of(folder, key, (members[f"{top}/data/{k}"] for k in storages))
    begins = {k: offsets[f"{top}/data/{k}"] for k in storages}
    reader = _Tensors(key, where, begins, rank)
    return TorchFile(reader.tree(value, ""), reader.spreads)


def storage_of(said: Any, where: str) -> Storage:
    """A storage by its persistent id."""
    if not (isinstance(said, tuple) and len(said) == 5 and said[0] == "storage"):
        raise FormatError("a persistent id that is no storage", where=where)
    _, kind, key, _, count = said
    if not isinstance(kind, Global) or kind.name not in STORAGES or type(key) is not str:
        raise FormatError("a storage of a kind that is not read here", where=where)
    return Storage(key, STORAGES[kind.name], document.integer(count, f"{where}: storage"))


class _Tensors:
    """Puts tensors in the place of the placeholders of a value."""

    def __init__(self, key: str, where: str, begins: Mapping[str, int], rank: int) -> None:
        self._key = key
        self._where = where
        self._begins = begins
        self._rank = rank
        self.spreads: dict[int, MeshPart] = {}

    def tree(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {k: self.tree(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self.tree(item, f"{path}[{n}]") for n, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Placeholder):
            return self.tensor(value, f"{self._where}: {path}")
        return value

    def tensor(self, said: Any, where: str) -> Any:
        """The tensor that a placeholder is; the placeholder itself where it is none."""
        match said.kind if isinstance(said, Placeholder) else "":
            case "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return self.tensor(said.args[0], where) if said.args else said
            case "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return self.stored(said, where)
            case "_rebuild_from_type_v2" if len(said.args) == 4:
                return self.subclass(said, where)
        return said

    def stored(self, said: Placeholder, where: str) -> StateTensor:
        storage, offset, shape, strides, dtype = tensor_of(said, where)
        size = dtype.itemsize
        begin = self._begins[storage.key] + offset * size
        extent = Extent(Box.whole(shape), self._key, begin, strides)
        return StateTensor(
            shape, dtype, (extent,), identity=(self._key, begin, shape, strides, dtype.name)
        )

    def subclass(self, said: Placeholder, where: str) -> StateTensor:
        rebuilt, kind, args, state = said.args
        if not isinstance(rebuilt, Global) or not isinstance(kind, Global):
            raise FormatError("a tensor of a kind that is not read here", where=where)
        name = kind.name.rpartition(".")[2]
        if rebuilt.name.endswith("_rebuild_wrapper_subclass") and name == "DTensor":
            fields = Placeholder("", (), state).fields()
            local = self.tensor(fields.get("_local_tensor"), where) if fields else None
            if not isinstance(local, StateTensor):
                raise FormatError("a DTensor without its local tensor", where=where)
            meshed = self.meshed(fields.get("_spec"), where)
            spread = dtensor(meshed, self._rank, local.shape, where)
            extents = [replace(e, box=spread.box) for e in local.extents if spread.box]
            identity = (local.identity, spread)
            found = StateTensor(spread.shape, local.dtype, tuple(extents), identity=identity)
            self.spreads[id(found)] = spread
            return found
        if rebuilt.name.endswith("_rebuild_wrapper_subclass") and name == "ShardedTensor":
            return self.sharded(state, where)
        if rebuilt.name.endswith(("_rebuild_tensor_v2", "_rebuild_tensor_v3")):
            found = self.tensor(Placeholder(rebuilt.name, args), where)
            if isinstance(found, StateTensor):
                return found
        raise FormatError("a tensor of a kind that is not read here", where=where, value=name)

    def meshed(self, spec: Any, where: str) -> Any:
        """A spec whose mesh has, in place of the tensor of older torch, what tells its shape."""
        if not isinstance(spec, Placeholder):
            return spec
        mesh = spec.fields().get("mesh")
        inner = mesh.fields().get("mesh") if isinstance(mesh, Placeholder) else None
        if not isinstance(mesh, Placeholder) or not isinstance(inner, Placeholder):
            return spec
        shaped = Placeholder(mesh.name, (), {**mesh.fields(), "mesh": self.tensor(inner, where)})
        return Placeholder(spec.name, (), {**spec.fields(), "mesh": shaped})

    def sharded(self, state: Any, where: str) -> StateTensor:
        shape, shards = sharded_tensor(state, where)
        if "flat_param" in where.rpartition(": ")[2].rpartition(".")[2]:
            raise FormatError(
                "a flat parameter of FSDP1 (LOCAL_STATE_DICT) does not say which parameters are "
                "where in it",
                where=where,
                hint="save with SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        extents: list[Extent] = []
        dtypes: list[DType] = []
        for box, said in shards:
            local = self.tensor(said, where) if isinstance(said, Placeholder) else None
            if not isinstance(local, StateTensor) or local.shape != box.shape:
                raise FormatError("a shard is not of the size that it says", where=where)
            extents += [replace(extent, box=box) for extent in local.extents]
            dtypes.append(local.dtype)
        properties = state[1].fields().get("tensor_properties")
        told = properties.state[0] if isinstance(properties, Placeholder) else None
        if not dtypes:
            dtypes.append(dtype_of(told, where))
        return StateTensor(shape, dtypes[0], tuple(extents))


def tensor_of(
    said: Placeholder, where: str
) -> tuple[Storage, int, tuple[int, ...], tuple[int, ...] | None, DType]:
    """The storage of a tensor, where in it the first element is, the shape, the strides where they
    are not those of C order, and the type; refused where it is not inside of its storage.
    """
    args = said.args
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise FormatError("a tensor without a storage", where=where)
    storage: Storage = args[0]
    offset = document.integer(args[1], f"{where}: offset")
    shape = document.integers(args[2], f"{where}: shape")
    strides = document.integers(args[3], f"{where}: stride")
    later = args[6:] if said.kind == "_rebuild_tensor_v2" else args[7:]
    if any(each for each in later):
        raise FormatError("a tensor that is conjugated or negated where it is read", where=where)
    dtype = DType.of(storage.dtype)
    if said.kind == "_rebuild_tensor_v3":
        dtype = dtype_of(args[6] if len(args) > 6 else None, where)
    if len(strides) != len(shape):
        raise FormatError("a tensor with other strides than dims", where=where)
    count = math.prod(shape)
    has = storage.count * DType.of(storage.dtype).itemsize
    end = (offset + (span_of(shape, strides) if count else 0)) * dtype.itemsize
    if end > has:
        raise FormatError(
            f"a tensor of {shape} reaches past its storage of {has} bytes", where=where
        )
    if count * dtype.itemsize > max(has, _MOST_REPEATED):
        raise FormatError(
            "an expanded tensor, whose elements are the same many times over",
            where=where,
            value=shape,
            hint="save tensor.contiguous(), or the tensor that it was expanded from",
        )
    return storage, offset, shape, None if _is_c_order(shape, strides) else strides, dtype


def dtype_of(said: Any, where: str) -> DType:
    """Our type of elements for one of torch."""
    if said not in DTYPES:
        raise FormatError("elements of a type that is not read here", where=where, value=said)
    return DType.of(DTYPES[said])


def with_tensors(tree: Any, change: Callable[[StateTensor], StateTensor]) -> Any:
    """A tree with other tensors in the place of its own."""
    if isinstance(tree, StateTensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: with_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_tensors(item, change) for item in tree)
    return tree


def _is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True
