"""Checkpoints of torch.distributed.checkpoint (DCP): a pickle that says which parts of which tensor
are in which file, and files that are one torch.save zip file after the other, one for each part.

Where the elements of a part begin, and in which order they lie, only the zip file of the part
says, in its first thousand bytes. They are read of all parts, many at a time, and looked through
once for parts that are alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import CkptkitError, FormatError
from ckptkit.foreign.extents import Extent, ForeignStep
from ckptkit.foreign.folder import DCP_METADATA, Folder, Place
from ckptkit.foreign.pickles import read_pickle
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.foreign.spread import by_boxes
from ckptkit.foreign.states import Path, StateTensor, put, reason, states_of, step_counted
from ckptkit.foreign.torch_file import (
    Storage,
    changed,
    dtype_of,
    is_whole,
    local_end,
    local_name,
    plain,
    read_file,
    storage_of,
    tensor_of,
)
from ckptkit.format.names import inner_name
from ckptkit.model import Box, DType, document
from ckptkit.storage import MemoryStore, Stored

_OF_RANK = re.compile(r"__(\d+)\.metadata")
_FILE_OF_RANK = re.compile(r"(?:.*/)?__(\d+)_.*")
# Files of torch.save that are written beside, by Lightning and by accelerate: what is under which
# name in them, None for a dictionary of all that is no tensor.
_BESIDE: dict[str, str | None] = {
    "meta.pt": None,
    "scheduler.bin": "scheduler",
    "scheduler.pt": "scheduler",
}
# The head of a part, up to its elements; longer ones are read again.
_HEAD_BYTES, _MOST_HEAD_BYTES = 1280, 1 << 16
_MOST_OBJECT_BYTES = 1 << 28
_ENDS = b".PK\x07\x08"
_BEGINS = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class _Head:
    """What the zip file of a part says: where its elements begin, and which they are."""

    begin: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType


@dataclass(frozen=True, slots=True)
class Contents:
    """What DCP files have, by flat names."""

    tensors: dict[str, StateTensor]
    objects: dict[str, Any]
    unread: dict[str, str]
    """Objects that cannot be read, with the reason."""
    paths: dict[str, Path]
    """Which path in a nested dictionary a name stands for."""
    files: list[str]


def read_dcp(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder."""
    has = contents_of(folder)
    tree, beside, unread = _tree(folder, has)
    found = states_of(tree, str(folder.store.location))
    found.left_out |= unread
    ranks = {int(m[1]) for file in has.files if (m := _FILE_OF_RANK.fullmatch(file))}
    strategy, arrays = by_boxes(found.arrays, max(ranks, default=0) + 1)
    used = (*has.files, *beside)
    return found.step(
        "dcp", folder, used, arrays=arrays, strategy=strategy, step=step_counted(tree)
    )


def with_optimizer(folder: Folder, model: ForeignStep) -> ForeignStep:
    """A model of Hugging Face with the optimizer that a Trainer under FSDP has DCP write beside it,
    into a folder of its own.
    """
    roles = {it.role for it in model.arrays} | {it.name for it in model.objects}
    if "optimizer" in roles or len(_apart(folder)) != 1 or DCP_METADATA in folder.files:
        return model
    has = contents_of(folder)
    tree, beside, unread = _tree(folder, has)
    # So that the states are those of its parameters; its arrays stay as they are.
    tree["model"] = {
        inner_name(it.name, it.role): StateTensor(it.shape, it.dtype, it.extents)
        for it in model.arrays
    }
    found = states_of(tree, str(folder.store.location))
    read = (*model.files, *has.files, *beside)
    details, names = dict(model.details), {it.name for it in model.arrays}
    found.left_out |= details.pop("left_out", {}) | unread
    for name in (*beside, *_apart(folder)):
        found.left_out.pop(name, None)
    return replace(
        model,
        files={key: folder.size(key) for key in read},
        arrays=[*model.arrays, *(it for it in found.arrays if it.name not in names)],
        objects=[*model.objects, *found.objects.values()],
        theirs={**found.theirs, **model.theirs},
        details=details | found.details,
        step=model.step or step_counted(tree),
    )


def _apart(folder: Folder) -> list[str]:
    """The folders of a model and of its optimizer that DCP wrote whole."""
    return [name for name in folder.apart if f"{name}/{DCP_METADATA}" in folder.files]


def _tree(folder: Folder, has: Contents) -> tuple[dict[Any, Any], list[str], dict[str, str]]:
    """The state dictionary, with what files beside it say; these files; and what cannot be read."""
    tree: dict[Any, Any] = {}
    for name, value in (*has.tensors.items(), *has.objects.items()):
        own: Path = (name,)
        # As Megatron names it, whose parameters are not in the middle of the name.
        if name.startswith("optimizer."):
            own = ("optim_state", name.removeprefix("optimizer."))
        put(tree, has.paths.get(name, own), value, name)
    tree = with_lists(tree)
    beside: list[str] = []
    unread = dict(has.unread)
    for key, under in _BESIDE.items():
        if key not in folder.files:
            continue
        try:
            said = read_file(folder, key).tree
        except FormatError as error:
            unread[key] = reason(error)
            continue
        more: Any = said if under is None else {under: said}
        if isinstance(more, dict) and not tree.keys() & more.keys():
            tree |= more
            beside.append(key)
    return tree, beside, unread


def contents_of(folder: Folder) -> Contents:
    """What the metadata of a folder and the heads of the parts say."""
    entries, items, paths = _metadata(folder)
    parts: dict[str, list[tuple[str, Box, Place, DType]]] = {}
    tensors: dict[str, tuple[tuple[int, ...], DType, list[Extent]]] = {}
    objects: dict[str, Place] = {}
    # Tensors of the same shape, spread in the same way, are one entry where the pickle allows it.
    described: dict[int, tuple[tuple[int, ...], DType, list[Box]]] = {}
    for name, entry in entries.items():
        where = f"{folder.store.location}: {name}"
        if entry.kind == "BytesStorageMetadata":
            item = items.get((name, None))
            if item is None:
                raise FormatError(
                    "no file has this object",
                    where=where,
                    hint="the metadata was changed, or is not whole; copy the folder again",
                )
            objects[name] = item
            continue
        if id(entry) not in described:
            described[id(entry)] = _described(entry, where)
        shape, dtype, boxes = described[id(entry)]
        tensors[name] = (shape, dtype, [])
        for box in boxes:
            item = items.get((name, box.offset))
            if item is not None and not box.is_empty:
                parts.setdefault(item.file, []).append((name, box, item, dtype))
    for (name, _), item in items.items():
        if item.offset + item.length > folder.size(item.file):
            raise FormatError(
                f"the file has {folder.size(item.file)} bytes, "
                f"a part of it ends at {item.offset + item.length}",
                where=f"{folder.where(item.file)}: {name}",
                hint="it was cut short; copy it again",
            )
    known: dict[int, dict[bytes, _Head]] = {}
    for file, there in parts.items():
        there.sort(key=lambda part: part[2].offset)
        for (name, box, item, dtype), head in zip(
            there, _heads(folder, file, [item for _, _, item, _ in there], known), strict=True
        ):
            if head.shape != box.shape or head.dtype != dtype:
                raise FormatError(
                    f"the part holds {head.dtype} of {head.shape}, "
                    f"by the metadata {dtype} of {box.shape}",
                    where=f"{folder.where(file)}: {name}",
                    hint="the files are of different checkpoints; copy the folder again",
                )
            begin = item.offset + head.begin
            tensors[name][2].append(Extent(box, file, begin, head.strides))
    unread: dict[str, str] = {}
    return Contents(
        {name: StateTensor(*has[:2], tuple(has[2])) for name, has in tensors.items()},
        dict(_objects(folder, objects, unread)),
        unread,
        paths,
        sorted({*parts, *(item.file for item in objects.values())}),
    )


def _documents(folder: Folder) -> dict[str, str]:
    """The files of metadata that count, and what the names in each are below."""
    keys = {DCP_METADATA: ""}
    # Without collectives each rank writes its own, of what it has.
    of_ranks = {int(m[1]): key for key in folder.files if (m := _OF_RANK.fullmatch(key))}
    if DCP_METADATA in folder.files and of_ranks:
        # Neither kind of save deletes what the other wrote, but both write the same data files.
        raise FormatError(
            "two saves are in the folder, one with metadata of its own for each rank",
            where=str(folder.store.location),
            value=[DCP_METADATA, of_ranks[min(of_ranks)]],
            hint="remove the metadata of the older one",
        )
    if DCP_METADATA not in folder.files:
        is_whole = sorted(of_ranks) == list(range(len(of_ranks)))
        keys = {of_ranks[rank]: "" for rank in sorted(of_ranks) if is_whole}
        keys = keys or {f"{name}/{DCP_METADATA}": f"{name}/" for name in _apart(folder)}
        # Of an optimizer's folder this is said, and the model read.
        models = [f"{name}/{DCP_METADATA}" for name in folder.apart if name.startswith("pytorch")]
        missing = next((key for key in models if key not in keys and not of_ranks), None)
        if missing or not keys:
            raise FormatError(
                "the metadata of the checkpoint is missing",
                where=folder.where(missing or DCP_METADATA),
                hint="a save that was interrupted has none; copy the folder again, or use another",
            )
    return keys


def _metadata(
    folder: Folder,
) -> tuple[dict[str, Placeholder], dict[tuple[str, Any], Place], dict[str, Path]]:
    """What is in the checkpoint by flat name; where each part is, by name and offset; and which
    path in a nested dictionary each name stands for.
    """
    entries: dict[str, Placeholder] = {}
    items: dict[tuple[str, Any], Place] = {}
    paths: dict[str, Path] = {}
    of_several: set[str] = set()
    for key, inside in _documents(folder).items():
        where = folder.where(key)
        found = read_pickle(folder.read(key), where)
        if not isinstance(found, Placeholder) or found.kind != "Metadata":
            raise FormatError("not the metadata of DCP", where=where, value=type(found).__name__)
        said = found.fields()
        for name, entry in _map(said.get("state_dict_metadata"), where).items():
            if type(name) is not str or not isinstance(entry, Placeholder):
                raise FormatError("not what DCP says of a tensor", where=where)
            if name in entries and inside:
                raise FormatError(
                    "two folders have this, of two models or optimizers",
                    where=f"{where}: {name}",
                    hint=f"name the folder that counts, such as {folder.where(inside)}",
                )
            if name in entries and entry.kind == "TensorStorageMetadata":
                parts = [it.fields().get("chunks") for it in (entry, entries[name])]
                if not all(isinstance(chunks, list) for chunks in parts):
                    raise FormatError("not what DCP says of a tensor", where=f"{where}: {name}")
                # Others may be of the same value: only this one gets the parts of all ranks.
                chunks = [chunk for chunks in parts for chunk in chunks or ()]
                fields = entry.fields() | {"chunks": chunks}
                entries[name] = Placeholder(entry.name, entry.args, fields)
                of_several.add(name)
            else:
                entries[name] = entry
        for index, info in _map(said.get("storage_data"), where).items():
            items.setdefault(*_stored(index, info, inside, where))
        paths |= {
            name: path
            for name, path in _map(said.get("planner_data") or {}, where).items()
            if type(path) is tuple and path and all(type(node) in (str, int) for node in path)
        }
    for name in of_several:
        where = f"{folder.store.location}: {name}"
        shape, _, boxes = _described(entries[name], where)
        # Where a job of fewer ranks saved into the folder, the files of the former one remain.
        if sum(box.size for box in {*boxes}) > math.prod(shape):
            raise FormatError(
                "parts of the tensor that ranks have overlap",
                where=where,
                hint="saves of two jobs are in the folder; remove the files of the older one",
            )
    return entries, items, paths


def _map(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("not the metadata of DCP", where=where, value=type(value).__name__)
    return value


def _stored(index: Any, info: Any, inside: str, where: str) -> tuple[tuple[str, Any], Place]:
    if not isinstance(index, Placeholder) or not isinstance(info, Placeholder):
        raise FormatError("not what DCP says of where a part is", where=where)
    key, said = index.fields(), info.fields()
    name, offset = document.text(key.get("fqn"), where), key.get("offset")
    if said.get("transform_descriptors"):
        raise FormatError(
            "its files are compressed by an extension of DCP, so that no part can be read alone",
            where=f"{where}: {name}",
            value=said["transform_descriptors"],
            hint="load it with torch, and save it again without extensions",
        )
    file = inside + document.text(said.get("relative_path"), f"{where}: {name}")
    start = document.integer(said.get("offset"), f"{where}: {name}")
    length = document.integer(said.get("length"), f"{where}: {name}")
    offset = None if offset is None else document.integers(offset, f"{where}: {name}")
    return (name, offset), Place(file, start, length)


def _described(entry: Placeholder, where: str) -> tuple[tuple[int, ...], DType, list[Box]]:
    """The shape, the type and the parts of a tensor."""
    said = entry.fields()
    properties = said.get("properties")
    if entry.kind != "TensorStorageMetadata" or not isinstance(properties, Placeholder):
        raise FormatError("not what DCP says of a tensor", where=where, value=entry.kind)
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.fields().get("dtype")
    shape, boxes = document.integers(said.get("size"), where), []
    chunks = said.get("chunks")
    for chunk in chunks if isinstance(chunks, list) else ():
        at = chunk.fields() if isinstance(chunk, Placeholder) else {}
        offsets = document.integers(at.get("offsets"), where)
        sizes = document.integers(at.get("sizes"), where)
        if not len(offsets) == len(sizes) == len(shape) or not Box.whole(shape).contains(
            box := Box(offsets, sizes)
        ):
            raise FormatError(
                f"a part that is not inside of {shape}", where=where, value=(offsets, sizes)
            )
        boxes.append(box)
    return shape, dtype_of(dtype, where), boxes


def _heads(
    folder: Folder, file: str, items: list[Place], known: dict[int, dict[bytes, _Head]]
) -> Iterator[_Head]:
    """The heads of parts in a file. Those of parts that are alike are alike to the byte: so each is
    looked up in those that are `known`, by their lengths, and added to them.
    """
    where = folder.where(file)
    ranges = [(item.offset, min(item.length, _HEAD_BYTES)) for item in items]
    for item, data in zip(items, folder.read_many(file, ranges), strict=True):
        alike = (heads.get(data[:length]) for length, heads in known.items())
        head = next((head for head in alike if head), None)
        if head is None:
            begins, most = data, min(item.length, _MOST_HEAD_BYTES)
            found = _head_of(begins, where)
            if found is None and len(begins) < most:
                (begins,) = folder.read_many(file, [(item.offset, most)])
                found = _head_of(begins, where)
            if found is None:
                raise FormatError(
                    "what the metadata says is a tensor is no file of torch.save",
                    where=where,
                    value=item.offset,
                    hint="the file was cut short or changed; copy it again",
                )
            length, head = found
            known.setdefault(length, {})[begins[:length]] = head
        if head.end > item.length:
            raise FormatError("a part is longer than the metadata says", where=where)
        yield head


def _head_of(data: bytes, where: str) -> tuple[int, _Head] | None:
    """How long the head of a part is, and what it says; None where the data is not all of it."""
    begin = local_end(data)
    ends = -1 if begin is None else data.find(_ENDS, begin)
    if begin is None:
        return None
    top, _, name = local_name(data).partition(b"/")
    if name != b"data.pkl":
        return None
    # Behind the pickle torch writes its size, which other writers have in front of it.
    told = data[begin : ends + 1] if ends >= 0 else data[begin:]
    said = read_pickle(told, where, lambda pid: storage_of(pid, where))
    if not isinstance(said, Placeholder) or not said.kind.startswith("_rebuild_tensor"):
        raise FormatError("a part that is no plain tensor", where=where)
    storage, offset, shape, strides, dtype = tensor_of(said, where)
    at = data.find(_BEGINS, max(begin, ends))
    while at >= 0:
        length = local_end(data[at:])
        if length is None or at + length > len(data):
            return None
        name = local_name(data[at:])
        if name == top + b"/byteorder" and data[at + length :][:6] != b"little":
            raise FormatError("its numbers are big-endian", where=where)
        if name == top + b"/data/" + storage.key.encode():
            starts = at + length
            size = storage.count * DType.of(storage.dtype).itemsize
            first = starts + offset * dtype.itemsize
            return starts, _Head(first, starts + size, shape, strides, dtype)
        at = data.find(_BEGINS, at + 4)
    return None


def _objects(
    folder: Folder, objects: Mapping[str, Place], unread: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """What is no tensor, by name; what cannot be read is added to `unread` with the reason."""
    known: dict[bytes, Any] = {}
    by_file: dict[str, list[tuple[str, Place]]] = {}
    for name, item in objects.items():
        if item.length > _MOST_OBJECT_BYTES:
            unread[name] = f"an object of {item.length} bytes"
        else:
            by_file.setdefault(item.file, []).append((name, item))
    for file, there in by_file.items():
        there.sort(key=lambda each: each[1].offset)
        ranges = [(item.offset, item.length) for _, item in there]
        for (name, item), data in zip(there, folder.read_many(file, ranges), strict=True):
            try:
                yield name, _object(data, file, item, f"{folder.where(file)}: {name}", known)
            except CkptkitError as error:
                if not is_whole(data):
                    raise FormatError(
                        "an object is damaged, or not there",
                        where=f"{folder.where(file)}: {name}",
                        hint="the file was cut short or changed; copy it again",
                    ) from error
                unread[name] = reason(error)


def _object(data: bytes, file: str, item: Place, where: str, known: dict[bytes, Any]) -> Any:
    begin = local_end(data)
    ends = -1 if begin is None else data.find(_ENDS, begin)
    told = data[begin : ends + 1] if ends >= 0 else b""
    if told in known:
        return known[told]
    has_storages = False

    def persistent(said: Any) -> Storage:
        nonlocal has_storages
        has_storages = True
        return storage_of(said, where)

    if told:
        value = read_pickle(told, where, persistent)
        if not has_storages:
            return known.setdefault(told, plain(value, where))
    # Tensors in objects, such as the state of a generator of random numbers.
    store = MemoryStore()
    store.put(file, data)
    inner = read_file(Folder(store, {file: Stored(file, len(data), 0.0)}), file)

    def placed(leaf: Any, _: str) -> Any:
        if not isinstance(leaf, StateTensor):
            return leaf
        extents = [replace(each, offset=each.offset + item.offset) for each in leaf.extents]
        return replace(leaf, extents=tuple(extents))

    return changed(inner.tree, placed)


def with_lists(tree: Any, depth: int = 0) -> Any:
    """A tree whose maps by numbers from 0 on are lists."""
    if not isinstance(tree, dict) or depth > 64:
        return tree
    made = {key: with_lists(value, depth + 1) for key, value in tree.items()}
    numbers = [key for key in made if type(key) is int]
    if depth and made and len(numbers) == len(made) and sorted(numbers) == [*range(len(made))]:
        return [made[number] for number in range(len(made))]
    return made
