"""The document of a snapshot of torchsnapshot: what each rank has at each path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.folder import Folder, parsed, read_yaml
from ckptkit.model import document

METADATA = ".snapshot_metadata"
_PATH = re.compile(r"(\d{1,8})/([^/]+(?:/[^/]+)*)")
_MOST_RANKS = 1 << 24
MOST_LEVELS = 64


def read_metadata(folder: Folder) -> tuple[int, dict[str, dict[int, dict[str, Any]]]]:
    """How many ranks there were, and by path and rank what each of them has."""
    where = folder.where(METADATA)
    if METADATA not in folder.files:
        raise FormatError(
            "the metadata of the snapshot is missing",
            where=where,
            hint="a snapshot that was interrupted has none, and a copy by `cp *` neither; copy the "
            "folder itself, or use another",
        )
    data = folder.read(METADATA)
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
        if match is None or int(match[1]) >= world or match[2].count("/") > MOST_LEVELS:
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
            where=folder.where(METADATA),
            hint="it was cut short or changed; copy it again",
        )
    return world, entries


def tensors_of(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tensors of an entry, each in one file."""
    if entry.get("type") == "Tensor":
        yield entry
    for key in ("shards", "chunks"):
        parts = entry.get(key)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(tensor := part.get("tensor"), dict):
                yield tensor


def check_slabs(folder: Folder, entries: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a file of many tensors of which some are in no entry. The shape of a sharded tensor is
    told nowhere: without its last shards it would be a smaller one.
    """
    ranges: dict[str, set[tuple[int, int]]] = {}
    for tensor in (each for entry in entries for each in tensors_of(entry)):
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
