"""Files of torch.save and of torch.distributed.checkpoint, to be written: a zip file with a pickle,
and in it one member for each tensor. Pickles are made of the few opcodes that torch's own loader of
weights allows; nothing of torch is needed for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from isal import isal_zlib

from ckptkit.errors import UnsupportedTypeError
from ckptkit.foreign.extents import c_order
from ckptkit.foreign.output.files import Checked, NewFile, NewFiles, NewTensor, Piece, shards_of
from ckptkit.format.pack import end_records

BEGIN, END = b"\x80\x02", b"."
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"

Keys: TypeAlias = tuple[str | int, ...]
"""Keys of nested dictionaries, and numbers of lists among them."""

_TOP = "archive"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_ALIGNED = 64
# From here on numbers are in 64 bits, elsewhere; and what stands where they would be.
_LARGE = _ELSEWHERE = 0xFFFFFFFF
_DATE = 0x21  # the first day that a zip file knows
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
# The checksum of a tensor is known when it has been written: it comes behind it. So do all others,
# as torch has it.
_BEHIND = 0x8
_STORAGES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


class _Member(NamedTuple):
    """A member of the zip file: `content` is its bytes, or the place of its tensor among all."""

    name: bytes
    header_offset: int
    nbytes: int
    content: bytes | int


def torch_file(
    key: str, tensors: Sequence[NewTensor], objects: Mapping[Keys, Any] | None = None
) -> NewFiles:
    """One file that `torch.load(weights_only=True)` reads as a dictionary of all tensors, or with
    objects as nested ones; tied tensors share their memory.
    """
    values = [(tensor, tensor_value(number, tensor)) for number, tensor in enumerate(tensors)]
    top = 1 if objects is None else 0
    leaves: list[tuple[Keys, bytes]] = []
    leaves += [(path[top:], value) for tensor, value in values for path in tensor.paths]
    leaves += [(path, plain(value, flat(path))) for path, value in (objects or {}).items()]
    pieces, _ = archive(BEGIN + nested(leaves) + END, tensors, range(len(tensors)))
    return NewFiles((NewFile(key, tuple(pieces)),))


def archive(
    pickle: bytes, tensors: Sequence[NewTensor], numbers: Sequence[int]
) -> tuple[list[Piece], int]:
    """The zip file of a pickle and its tensors, which have these numbers, and its size."""
    contents: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickle),
        ("byteorder", b"little"),
        *((f"data/{place}", place) for place in range(len(tensors))),
        ("version", b"3\n"),
    ]
    members: list[_Member] = []
    pieces: list[Piece] = []
    end = 0
    for inner, content in contents:
        nbytes = len(content) if isinstance(content, bytes) else tensors[content].nbytes
        member = _Member(f"{_TOP}/{inner}".encode(), end, nbytes, content)
        header = _local(member)
        members.append(member)
        pieces += [header, content if isinstance(content, bytes) else numbers[content]]
        end += len(header) + nbytes
        make = partial(_behind, nbytes)
        if isinstance(content, bytes):
            pieces.append(make([isal_zlib.crc32(content)]))
        else:
            pieces.append(Checked(len(make([0])), (numbers[content],), make))
        end += len(make([0]))
    closing = partial(_directory, members, end)
    size = len(closing([0] * len(numbers)))
    pieces.append(Checked(size, tuple(numbers), closing))
    return pieces, end + size


def _local(member: _Member) -> bytes:
    """All bytes from a member's header up to its data, which begins where torch wants it."""
    is_large = member.nbytes >= _LARGE
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
    begin = member.header_offset + _LOCAL.size + len(member.name) + len(extra) + 4
    padding = -begin % _ALIGNED
    extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
    version, size = (45, _ELSEWHERE) if is_large else (20, 0)
    lengths = len(member.name), len(extra)
    fixed = (b"PK\3\4", version, _BEHIND, 0, 0, _DATE, 0, size, size, *lengths)
    return _LOCAL.pack(*fixed) + member.name + extra


def _behind(nbytes: int, crcs: Sequence[int]) -> bytes:
    """What comes behind a member: its checksum."""
    form = "<4sIQQ" if nbytes >= _LARGE else "<4sIII"
    return struct.pack(form, b"PK\7\10", crcs[0], nbytes, nbytes)


def _directory(members: Sequence[_Member], offset: int, crcs: Sequence[int]) -> bytes:
    """The end of the file, which begins at `offset`."""
    found = bytearray()
    for name, at, nbytes, content in members:
        large = [number for number in (nbytes, nbytes) if nbytes >= _LARGE]
        large += [at] if at >= _LARGE else []
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        crc = isal_zlib.crc32(content) if isinstance(content, bytes) else crcs[content]
        size, version = _ELSEWHERE if nbytes >= _LARGE else nbytes, 45 if large else 20
        offset32 = _ELSEWHERE if at >= _LARGE else at
        found += _CENTRAL.pack(
            *(b"PK\1\2", version, version, _BEHIND, 0, 0, _DATE, crc, size, size),
            *(len(name), len(extra), 0, 0, 0, 0, offset32),
        )
        found += name + extra
    return bytes(found) + end_records(len(members), len(found), offset)


def tensor_value(place: int, tensor: NewTensor) -> bytes:
    """A tensor in a pickle, on the storage of a place."""
    dtype, elements = tensor.dtype, tensor.nbytes // tensor.dtype.itemsize
    storage, count, version = named("torch.storage", "UntypedStorage"), tensor.nbytes, 3
    more = [named("torch", dtype.torch)]
    if dtype.name in _STORAGES:
        storage, count, version = named("torch", f"{_STORAGES[dtype.name]}Storage"), elements, 2
        more = []
    known = (text("storage"), storage, text(str(place)), text("cpu"), integer(count))
    arguments = [
        tupled(known) + b"Q",
        integer(0),
        tupled(map(integer, tensor.shape)),
        tupled(map(integer, c_order(tensor.shape))),
        FALSE,  # asks for no gradient
        called(named("collections", "OrderedDict"), []),
        *more,
    ]
    return called(named("torch._utils", f"_rebuild_tensor_v{version}"), arguments)


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


# Values as pickles have them, written by hand.


def flat(path: Keys) -> str:
    """What torch.distributed.checkpoint calls it."""
    return ".".join(map(str, path))


def named(module: str, name: str) -> bytes:
    """A class or a function."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value: int) -> bytes:
    """One that is not negative."""
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x09" + value.to_bytes(9, "little")


def tupled(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapped(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A dictionary."""
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def called(function: bytes, arguments: Sequence[bytes]) -> bytes:
    return function + tupled(arguments) + b"R"


def instance(of: bytes, state: bytes | Mapping[str, bytes]) -> bytes:
    """An object of a class, whose state is a value or its attributes."""
    if isinstance(state, Mapping):
        state = mapped((text(name), value) for name, value in state.items())
    return of + b")\x81" + state + b"b"


def plain(value: Any, where: str = "") -> bytes:
    """A plain value; UnsupportedTypeError for any other."""
    if value is None or type(value) is bool:
        return NONE if value is None else TRUE if value else FALSE
    if type(value) is int:
        size = value.bit_length() // 8 + 1
        return b"\x8a" + size.to_bytes(1, "little") + value.to_bytes(size, "little", signed=True)
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is str:
        return text(value)
    if type(value) in (list, tuple):
        items = [plain(item, where) for item in value]
        return tupled(items) if type(value) is tuple else _listed(items)
    if type(value) is dict:
        return mapped((plain(k, where), plain(item, where)) for k, item in value.items())
    raise UnsupportedTypeError(
        "other programs have no such value",
        where=where,
        value=type(value).__name__,
        hint="leave the optimizer out",
    )


def nested(leaves: Iterable[tuple[Keys, bytes]]) -> bytes:
    """Dictionaries and lists of values, each at its path."""
    tree: dict[Any, Any] = {}
    for path, data in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = data
    return _nested(tree)


def _nested(node: Any) -> bytes:
    if isinstance(node, bytes):
        return node
    if node and all(type(key) is int for key in node):
        return _listed(_nested(node[key]) for key in sorted(node))
    return mapped((text(key), _nested(inner)) for key, inner in node.items())


def _listed(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"
