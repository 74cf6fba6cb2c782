"""The files of other formats: which bytes each has, and which tensors. Nothing is written here;
`files` fills them from a step.

Those of torch.save and of torch.distributed.checkpoint are zip files with a pickle, and in them one
member for each tensor. Pickles are made of the few opcodes that torch's own loader of weights
allows; nothing of torch is needed for it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from isal import isal_zlib

from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.foreign.extents import c_order
from ckptkit.foreign.readers.safetensors import INDEX, METADATA, MOST_HEADER, SPELLED
from ckptkit.format.names import MODEL
from ckptkit.format.pack import end_records
from ckptkit.model import DType
from ckptkit.model.display import natural_order

_SPELLED = {dtype: spelled for spelled, dtype in SPELLED.items()}
_HEADER_ALIGNED = 8
EMBEDDINGS = ("shared", "embed", "wte")
"""What the names of embeddings have in them, the first ones first."""

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


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor as its new file has it: raw little-endian elements in C order."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    tied: tuple[str, ...] = ()
    """Its other names."""
    above: tuple[str, ...] = (MODEL,)
    """The keys of the dictionaries that it is in, where a format has such."""

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Where it is in nested dictionaries, by each of its names."""
        return [(*self.above, name) for name in (self.name, *self.tied)]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """Bytes of a file with the CRC-32 of tensors that come before them."""

    nbytes: int
    tensors: tuple[int, ...]
    make: Callable[[Sequence[int]], bytes]
    """Makes the bytes from the checksums of these tensors."""


Piece: TypeAlias = bytes | int | Checked


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file: bytes, and numbers of tensors whose elements come next."""

    key: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class NewFiles:
    """What is to be written: large files, then what makes them a checkpoint."""

    files: tuple[NewFile, ...]
    closing: tuple[tuple[str, bytes], ...] = ()
    """Keys and contents of what is written last."""


def safetensors_file(key: str, tensors: Sequence[NewTensor]) -> NewFiles:
    """All tensors in one file."""
    return NewFiles((_file(key, tensors, range(len(tensors))),))


def hugging_face(tensors: Sequence[NewTensor], most: int) -> NewFiles:
    """The files of a folder that transformers opens, each with at most `most` bytes of tensors, or
    one tensor that is larger; and the index of several.
    """
    shards = shards_of(tensors, most)
    if len(shards) == 1:
        return NewFiles((_file("model.safetensors", tensors, shards[0]),))
    files = [
        _file(f"model-{place:05d}-of-{len(shards):05d}.safetensors", tensors, numbers)
        for place, numbers in enumerate(shards, 1)
    ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {
            tensors[number].name: file.key
            for file, numbers in zip(files, shards, strict=True)
            for number in numbers
        },
    }
    text = json.dumps(index, indent=2) + "\n"
    return NewFiles(tuple(files), ((f"model{INDEX}", text.encode()),))


def shards_of(tensors: Sequence[NewTensor], most: int) -> list[list[int]]:
    """The numbers of the tensors of each file: neighbours with at most so many bytes, or one."""
    shards: list[list[int]] = [[]]
    room = most
    names = [flat(tensor.paths[0]) for tensor in tensors]
    places = {name: place for place, name in enumerate(natural_order(names))}
    for number in sorted(range(len(tensors)), key=lambda n: places[names[n]]):
        nbytes = tensors[number].nbytes
        if shards[-1] and nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(number)
        room -= nbytes
    return shards


def plain_name(names: Sequence[str]) -> str:
    """Of the names of one tied tensor the one that it is stored under: that of the embedding, for
    that is where transformers look for it.
    """
    of_embeddings = (name for part in EMBEDDINGS for name in names if part in name)
    return next(of_embeddings, names[0])


def _file(key: str, tensors: Sequence[NewTensor], numbers: Sequence[int]) -> NewFile:
    """A safetensors file. Tensors with larger elements come first: then all are aligned."""
    names = natural_order(tensors[number].name for number in numbers)
    places = {name: place for place, name in enumerate(names)}
    order = sorted(numbers, key=lambda n: (-tensors[n].dtype.itemsize, places[tensors[n].name]))
    # Transformers refuses files that do not say of which framework they are.
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for number in order:
        tensor = tensors[number]
        if tensor.dtype.name not in _SPELLED:
            raise UnsupportedTypeError(
                "safetensors has no such element type",
                where=tensor.name,
                value=tensor.dtype.name,
                hint="convert the array on the way (--cast), or leave it out",
            )
        if tensor.name == METADATA:
            raise FormatError("safetensors keeps this name for itself", where=tensor.name)
        header[tensor.name] = {
            "dtype": _SPELLED[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (end, end + tensor.nbytes),
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNED)
    if len(text) > MOST_HEADER:
        raise FormatError(
            f"the header would have {len(text)} bytes, {MOST_HEADER} are allowed",
            where=key,
            hint="write a folder of several files",
        )
    return NewFile(key, (len(text).to_bytes(8, "little") + text, *order))


class _Member(NamedTuple):
    """A member of the zip file: `content` is its bytes, or the number of its tensor in the file."""

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


def dcp_folder(
    tensors: Sequence[NewTensor], most: int, objects: Mapping[Keys, Any] | None = None
) -> NewFiles:
    """A folder that `dcp.load({"model": ...})` reads under any layout, with the objects of
    `get_optimizer_state_dict` also `"optimizer"`; its files have at most `most` bytes of tensors,
    or one tensor that is larger.
    """
    files: list[NewFile] = []
    described: list[tuple[bytes, bytes]] = []
    stored: list[tuple[bytes, bytes]] = []
    spelled: list[tuple[bytes, bytes]] = []
    groups: list[Sequence[int | Keys]] = [
        *shards_of(tensors, most),
        *([[*objects]] if objects else []),
    ]
    for place, group in enumerate(groups):
        key, end = f"__0_{place}.distcp", 0
        pieces: list[Piece] = []
        for each in group:
            if isinstance(each, int):
                tensor, index = tensors[each], integer(0)
                paths: Sequence[Keys] = tensor.paths
                said, offset = _tensor(tensor), _size((0,) * len(tensor.shape))
                item, nbytes = archive(BEGIN + tensor_value(0, tensor) + END, [tensor], [each])
            else:
                index, offset, paths = NONE, NONE, [each]
                said = instance(named(_METADATA, "BytesStorageMetadata"), {})
                value = plain((objects or {})[each], flat(each))
                item, nbytes = archive(BEGIN + value + END, [], [])
            info = {"relative_path": text(key), "offset": integer(end), "length": integer(nbytes)}
            where = instance(named(_FILESYSTEM, "_StorageInfo"), info)
            for path in paths:
                name = text(flat(path))
                part = {"fqn": name, "offset": offset, "index": index}
                described.append((name, said))
                stored.append((instance(named(_METADATA, "MetadataIndex"), part), where))
                spelled.append((name, plain(path)))
            pieces += item
            end += nbytes
        files.append(NewFile(key, tuple(pieces)))
    found = {
        "state_dict_metadata": mapped(described),
        "planner_data": mapped(spelled),
        "storage_data": mapped(stored),
    }
    metadata = BEGIN + instance(named(_METADATA, "Metadata"), found) + END
    # Last: without it nobody takes the files for a checkpoint.
    return NewFiles(tuple(files), ((".metadata", metadata),))


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

    def made(node: Any) -> bytes:
        if isinstance(node, bytes):
            return node
        if node and all(type(key) is int for key in node):
            return _listed(made(node[key]) for key in sorted(node))
        return mapped((text(key), made(inner)) for key, inner in node.items())

    return made(tree)


def _listed(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"
