"""A folder of torch.distributed.checkpoint (DCP), to be written: files of one zip file for each
tensor, and the pickle that says where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.output.files import NewFile, NewFiles, NewTensor, Piece, shards_of
from ckptkit.foreign.output.opcodes import (
    BEGIN,
    END,
    FALSE,
    NONE,
    Keys,
    called,
    flat,
    instance,
    integer,
    mapped,
    named,
    plain,
    text,
    tupled,
)
from ckptkit.foreign.output.torch_save import archive, tensor_value

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor or an object in the files: what `.metadata` says of it."""

    paths: Sequence[Keys]
    offsets: bytes
    """Of its only part."""
    index: bytes
    described: bytes
    where: bytes


def dcp_folder(
    tensors: Sequence[NewTensor], most: int, objects: Mapping[Keys, Any] | None = None
) -> NewFiles:
    """A folder that `dcp.load({"model": ...})` reads under any layout, with the objects of
    `get_optimizer_state_dict` also `"optimizer"`; its files have at most `most` bytes of tensors,
    or one tensor that is larger.
    """
    files: list[NewFile] = []
    stored: list[_Written] = []
    for place, numbers in enumerate(shards_of(tensors, most)):
        key = f"__0_{place}.distcp"
        pieces: list[Piece] = []
        end = 0
        for number in numbers:
            tensor = tensors[number]
            value = BEGIN + tensor_value(0, tensor) + END
            item, nbytes = archive(value, [tensor], [number])
            zeros = _size((0,) * len(tensor.shape))
            where = _where(key, end, nbytes)
            stored.append(_Written(tensor.paths, zeros, integer(0), _tensor(tensor), where))
            pieces += item
            end += nbytes
        files.append(NewFile(key, tuple(pieces)))
    if objects:
        key, pieces, end = f"__0_{len(files)}.distcp", [], 0
        for path, value in objects.items():
            item, nbytes = archive(BEGIN + plain(value, flat(path)) + END, [], [])
            said = instance(named(_METADATA, "BytesStorageMetadata"), {})
            stored.append(_Written([path], NONE, NONE, said, _where(key, end, nbytes)))
            pieces += item
            end += nbytes
        files.append(NewFile(key, tuple(pieces)))
    # Last: without it nobody takes the files for a checkpoint.
    return NewFiles(tuple(files), ((".metadata", _metadata(stored)),))


def _where(key: str, offset: int, nbytes: int) -> bytes:
    where = {"relative_path": text(key), "offset": integer(offset), "length": integer(nbytes)}
    return instance(named(_FILESYSTEM, "_StorageInfo"), where)


def _metadata(stored: Sequence[_Written]) -> bytes:
    whole, where, paths = [], [], []
    for item in stored:
        for path in item.paths:
            name = text(flat(path))
            index = {"fqn": name, "offset": item.offsets, "index": item.index}
            whole.append((name, item.described))
            where.append((instance(named(_METADATA, "MetadataIndex"), index), item.where))
            paths.append((name, plain(path)))
    found = {
        "state_dict_metadata": mapped(whole),
        "planner_data": mapped(paths),
        "storage_data": mapped(where),
    }
    return BEGIN + instance(named(_METADATA, "Metadata"), found) + END


def _tensor(tensor: NewTensor) -> bytes:
    layout = called(named("torch.serialization", "_get_layout"), [text("torch.strided")])
    contiguous = called(named(_METADATA, "_MEM_FORMAT_ENCODING"), [integer(0)])
    dtype = named("torch", tensor.dtype.torch)
    chunk = {"offsets": _size((0,) * len(tensor.shape)), "sizes": _size(tensor.shape)}
    return instance(
        named(_METADATA, "TensorStorageMetadata"),
        {
            "properties": instance(
                named(_METADATA, "TensorProperties"),
                tupled((dtype, layout, FALSE, contiguous, FALSE)),
            ),
            "size": _size(tensor.shape),
            "chunks": b"]" + instance(named(_METADATA, "ChunkStorageMetadata"), chunk) + b"a",
        },
    )


def _size(shape: Sequence[int]) -> bytes:
    return called(named("torch", "Size"), [tupled(map(integer, shape))])
