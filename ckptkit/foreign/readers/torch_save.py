"""Checkpoints of torch.save: one file, the files of a model with their index, or those of all
ranks of a job, also as torch_checkpointing calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent, ForeignStep
from ckptkit.foreign.folder import Folder, config_of
from ckptkit.foreign.readers.dcp import with_optimizer
from ckptkit.foreign.readers.safetensors import weight_map
from ckptkit.foreign.spread import MeshPart, strategy_of
from ckptkit.foreign.states import (
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    Path,
    States,
    StateTensor,
    reason,
    states_of,
    step_counted,
)
from ckptkit.foreign.torch_file import read_file
from ckptkit.format.encoding import unseal
from ckptkit.model import Box

INDEX = ".bin.index.json"
_RANK = re.compile(
    r"(?P<what>.*?)_?(?:world_size_(?P<size>\d+)_)?rank_?(?P<rank>\d+)\.(?:pt|bin|pth)"
)
_SHARD = re.compile(r"(?P<what>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.(?:pt|bin|pth)")
_PART = re.compile(r"consolidated\.\d+\.pth")
# What torch_checkpointing calls the file of an item of a rank. What our storage of it wrote has
# these deeper, and beside them a record, created last, that says where.
_ITEM = re.compile(r"(?P<what>[^/]+)_(?P<rank>\d{1,9})\.pt")
RECORD, FILES, SUMS = "commit.msgpack", "files", "sums"
RECORD_KIND = "ckptkit-torch-checkpointing"

_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_MODELS = ("pytorch_model", "model", "consolidated", "consolidated.00", "adapter_model")
_OPTIMIZERS = ("optimizer", "optim")
_EXTRAS = ("extra", "rng", "random")


def read_torch(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder, or in its one file."""
    if folder.only is not None and not folder.only.endswith(INDEX):
        return _one(folder, {folder.only: None})
    names = [key for key in folder.files if "/" not in key]
    indexes = [key for key in names if key.endswith(INDEX)]
    if folder.only is not None:
        indexes = [folder.only]
    if len(indexes) == 1:
        names_in: dict[str, set[str]] = {}
        for name, key in weight_map(folder, indexes[0]).items():
            names_in.setdefault(key, set()).add(name)
        return _one(folder, names_in)
    files = [key for key in names if key.endswith(_ENDINGS)]
    ranks = _ranks(folder, files)
    only_ranks = ranks.keys() == set(files)
    if ranks and (only_ranks or any(_holds_model(match) for match in ranks.values())):
        return _of_ranks(folder, ranks)
    files = [key for key in files if key not in ranks]
    beside = dict.fromkeys(sorted(ranks), "of one rank, beside a model that is not")
    if shards := [key for key in files if _SHARD.fullmatch(key)]:
        _check_shards(folder, shards)
        beside |= {key: "beside the files of a model" for key in files if key not in shards}
        return _one(folder, dict.fromkeys(sorted(shards)), beside)
    parts = sorted(key for key in files if _PART.fullmatch(key))
    if parts and parts != ["consolidated.00.pth"]:
        raise FormatError(
            "each of these files has a part of every tensor, and does not say which",
            where=str(folder.store.location),
            value=parts[:8],
            hint="convert them with the script of transformers for these weights; where one file "
            f"is all of a model, name it: {folder.where(parts[0])}",
        )
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
        files = [*models, *more]
    return _one(folder, dict.fromkeys(files), beside)


def read_torch_checkpointing(folder: Folder) -> ForeignStep:
    """The step of a checkpoint of torch_checkpointing: of all items that torch.save wrote."""
    below = ""
    if RECORD in folder.files:
        written = unseal(RECORD_KIND, folder.read(RECORD), folder.where(RECORD)).get("id")
        below = f"{FILES}/{written}/"
    found = {key: _ITEM.fullmatch(key.removeprefix(below)) for key in folder.files}
    ranks = {key: match for key, match in found.items() if match and key.startswith(below)}
    if not ranks:
        raise FormatError(
            "no item is in a file of torch.save",
            where=str(folder.store.location),
            hint="items with another layout are read by torch_checkpointing alone",
        )
    return replace(_of_ranks(folder, ranks, are_items=True), format="torch_checkpointing")


def _ranks(folder: Folder, files: Sequence[str]) -> dict[str, re.Match[str]]:
    """The files of a folder that ranks of a job wrote, by their names."""
    ranks = {key: match for key in files if (match := _RANK.fullmatch(key))}
    if len(ranks) == 1:
        match = next(iter(ranks.values()))
        if int(match["rank"]) and not match["size"]:
            return {}  # `lora_rank8.pt` is of a model whose adapters have that rank
    models = [key for key in files if key not in ranks and key.rpartition(".")[0] in _MODELS]
    if models and any(_holds_model(match) for match in ranks.values()):
        raise FormatError(
            "a model is in the folder, and files of ranks that may be another one",
            where=str(folder.store.location),
            value=[models[0], *sorted(ranks)[:8]],
            hint=f"name the file that counts, such as {folder.where(models[0])}, or move the files "
            "of ranks into a folder of their own",
        )
    return ranks


def _holds_model(match: re.Match[str]) -> bool:
    """Whether a file of a rank is of the model, and not beside it."""
    return not match["what"].startswith((*_EXTRAS, *_OPTIMIZERS, "scheduler"))


def _check_shards(folder: Folder, shards: Sequence[str]) -> None:
    """Refuse files that each say how many they are, where there are others."""
    matches = [match for key in shards if (match := _SHARD.fullmatch(key))]
    first = matches[0]
    count = int(first["count"])
    there = {int(match["number"]) for match in matches}
    missing: list[int] = []
    if len({(match["what"], int(match["count"])) for match in matches}) > 1:
        what = "files of several models are in the folder, without an index"
    elif len(there) < len(shards) or len(there) > count:
        what = "more files than their names say"
    else:
        within = sum(1 <= number <= count for number in there)
        missing = list(islice((n for n in range(1, count + 1) if n not in there), 8))
        what = f"of {count} files that belong together {count - within} are missing"
        if not missing:
            return
    raise FormatError(
        what,
        where=str(folder.store.location),
        value=[
            shards[0].replace(f"-{first['number']}-of-", f"-{n:0{len(first['number'])}}-of-")
            for n in missing
        ]
        or sorted(shards)[:8],
        hint="copy all files of the model into one folder, with their index",
    )


def _one(
    folder: Folder,
    files: Mapping[str, set[str] | None],
    beside: Mapping[str, str] | None = None,
) -> ForeignStep:
    """The step of files that are one state dictionary together; `beside` are those left out."""
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
        if len(files) > 1 and names is None and not _SHARD.fullmatch(key):
            value = {"optimizer" if stem in _OPTIMIZERS else "model": value}
        if tree.keys() & value.keys():
            raise FormatError("a tensor is in several files", where=folder.where(key))
        tree |= value
    found = states_of(tree, str(folder.store.location))
    found.left_out |= beside or {}
    return _step(folder, files, found, step_counted(tree))


def _step(
    folder: Folder, files: Iterable[str], found: States, number: int, **more: Any
) -> ForeignStep:
    if not found.arrays:
        raise FormatError(
            "no tensor is in what torch.save wrote here",
            where=str(folder.store.location),
            value=sorted(files)[:8],
            hint="name the file that the tensors are in",
        )
    more |= {"sizes": config_of(folder), "step": number}
    return with_optimizer(folder, found.step("torch.save", folder, files, **more))


def _of_ranks(
    folder: Folder, ranks: Mapping[str, re.Match[str]], *, are_items: bool = False
) -> ForeignStep:
    """The step of files of which each rank of a job wrote one, or one of each kind; a kind may be
    an item of one state dictionary.
    """
    kinds: dict[str, dict[int, str]] = {}
    for key, match in ranks.items():
        kinds.setdefault(match["what"], {})[int(match["rank"])] = key
    world = max(len(files) for files in kinds.values())
    said = {int(size) for match in ranks.values() if (size := match.groupdict().get("size"))}
    if said and said != {world}:
        _incomplete(folder, max(said), kinds)
    trees: list[dict[Any, Any]] = [{} for _ in range(world)]
    spreads: dict[int, MeshPart] = {}
    left_out: dict[str, str] = {}
    for what, files in kinds.items():
        if not _is_whole(files, world):
            _incomplete(folder, world, kinds)
        is_extra = what.startswith(_EXTRAS)
        if are_items:
            is_extra = what not in MODEL_KEYS and what not in OPTIMIZER_KEYS
        for rank, key in files.items():
            try:
                part = read_file(folder, key, rank)
            except FormatError as error:
                if not is_extra:
                    raise
                # Schedulers and random numbers: a model without them is one, too.
                left_out[key] = reason(error)
                continue
            spreads |= part.spreads
            if are_items:
                trees[rank][what] = part.tree
                continue
            tree = part.tree if isinstance(part.tree, dict) else {"value": part.tree}
            if is_extra:
                tree = {what: tree}
            elif not tree.keys() & {"model", "optimizer"}:
                is_optimizer = what.startswith(_OPTIMIZERS) and "state" in tree
                tree = {"optimizer" if is_optimizer else "model": tree}
            if clashes := trees[rank].keys() & tree.keys():
                raise FormatError(
                    f"several files of rank {rank} have the same: a model that is not the other's",
                    where=folder.where(key),
                    value=sorted(map(str, clashes))[:8],
                    hint="move the files of each model into a folder of their own",
                )
            trees[rank] |= tree
    merged = _Merge(spreads, str(folder.store.location))
    tree = merged.merge(trees, ())
    found = states_of(tree, str(folder.store.location))
    found.left_out |= left_out
    by_name: dict[str, MeshPart] = {}
    for array in found.arrays:
        if array.extents and (spread := merged.spreads.get(array.extents)):
            by_name[array.name] = spread
    strategy, arrays = strategy_of(by_name, found.arrays, world)
    details = {"of_rank_0": sorted(merged.differing)} if merged.differing else {}
    more = {"arrays": arrays, "strategy": strategy, "details": details}
    return _step(folder, ranks, found, step_counted(tree), **more)


def _incomplete(folder: Folder, world: int, kinds: Mapping[str, Mapping[int, str]]) -> None:
    short = {what: files for what, files in kinds.items() if not _is_whole(files, world)}
    what, files = next(iter(short.items()), ("", {}))
    # A name may say any number of ranks.
    missing = islice((rank for rank in range(world) if rank not in files), 8)
    raise FormatError(
        f"the files of {world} ranks belong together, "
        f"of {what or 'them'} {world - sum(rank < world for rank in files)} are missing",
        where=str(folder.store.location),
        value=[f"rank {rank}" for rank in missing],
        hint="copy the files of all ranks into one folder",
    )


def _is_whole(files: Mapping[int, str], world: int) -> bool:
    return len(files) == world and max(files) < world


@dataclass(slots=True, eq=False)
class _Merge:
    """Trees of all ranks made one: of a tensor the parts of all, of a value that of rank 0."""

    of_tensors: Mapping[int, MeshPart]
    where: str
    spreads: dict[tuple[Extent, ...], MeshPart] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)
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

    def _tensor(self, parts: Sequence[StateTensor], path: Path) -> Any:
        first = parts[0]
        # Only of tensors that are spread nothing is told of the content.
        looks = {(part.shape, part.dtype, part.content) for part in parts}
        if len(looks) > 1:
            if path[0] not in ("model", "optimizer"):
                return {f"rank.{rank}": part for rank, part in enumerate(parts)}
            raise FormatError(
                "the ranks' tensors differ, and do not say how they belong together",
                where=f"{self.where}: {'.'.join(map(str, path))}",
                value=sorted({str(part.shape) for part in parts}),
                hint="plain tensors of ranks that each hold a part cannot be put together: "
                "save DTensors, or with torch.distributed.checkpoint",
            )
        extents = tuple(extent for part in parts for extent in part.extents)
        whole = Box.whole(first.shape)
        if extents and all(extent.box == whole for extent in extents):
            extents = extents[:1]  # a replica on each rank
        merged = replace(first, extents=extents)
        spread = self.of_tensors.get(id(first))
        if spread is not None:
            self.spreads[extents] = spread
        return merged
