"""A folder of torch.distributed.checkpoint (DCP), to be written: files of one zip file for each
tensor, and the pickle that says where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.foreign.output.files import NewFile, NewFiles, NewTensor, Piece, shards_of
from ckptkit.foreign.output.opcodes import (
    BEGIN,
    END,
    FALSE,
    called,
    instance,
    integer,
    mapped,
    named,
    text,
    tupled,
)
from ckptkit.foreign.output.torch_save import archive, tensor_value
from ckptkit.format.names import MODEL

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def dcp_folder(tensors: Sequence[NewTensor], most: int) -> NewFiles:
    """A folder that `dcp.load({"model": ...})` reads under any layout; its files have at most
    `most` bytes of tensors, or one tensor that is larger.
    """
    files: list[NewFile] = []
    stored: list[tuple[NewTensor, bytes]] = []
    for place, numbers in enumerate(shards_of(tensors, most)):
        key = f"__0_{place}.distcp"
        pieces: list[Piece] = []
        end = 0
        for number in numbers:
            tensor = tensors[number]
            value = BEGIN + tensor_value(0, tensor) + END
            item, nbytes = archive(value, [tensor], [number])
            where = {
                "relative_path": text(key),
                "offset": integer(end),
                "length": integer(nbytes),
            }
            stored.append((tensor, instance(named(_FILESYSTEM, "_StorageInfo"), where)))
            pieces += item
            end += nbytes
        files.append(NewFile(key, tuple(pieces)))
    # Last: without it nobody takes the files for a checkpoint.
    return NewFiles(tuple(files), ((".metadata", _metadata(stored)),))


def _metadata(stored: Sequence[tuple[NewTensor, bytes]]) -> bytes:
    whole, where, paths = [], [], []
    for tensor, info in stored:
        zeros = (0,) * len(tensor.shape)
        for name in (tensor.name, *tensor.tied):
            flat = text(f"{MODEL}.{name}")
            index = {"fqn": flat, "offset": _size(zeros), "index": integer(0)}
            whole.append((flat, _tensor(tensor)))
            where.append((instance(named(_METADATA, "MetadataIndex"), index), info))
            paths.append((flat, tupled((text(MODEL), text(name)))))
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
