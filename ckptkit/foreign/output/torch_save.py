"""A file of torch.save, to be written: a zip file with a pickle, and in it one member for each
tensor. The pickle is made of the few opcodes that torch's own loader of weights allows; nothing of
torch is needed for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from isal import isal_zlib

from ckptkit.foreign.output.files import Checked, NewFile, NewFiles, NewTensor, Piece
from ckptkit.foreign.output.opcodes import (
    BEGIN,
    END,
    FALSE,
    Keys,
    called,
    flat,
    integer,
    named,
    nested,
    plain,
    text,
    tupled,
)
from ckptkit.format.pack import end_records

_TOP = "archive"
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
    strides = [1]
    for extent in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    steps = reversed(strides) if tensor.shape else ()
    known = (text("storage"), storage, text(str(place)), text("cpu"), integer(count))
    arguments = [
        tupled(known) + b"Q",
        integer(0),
        tupled(map(integer, tensor.shape)),
        tupled(map(integer, steps)),
        FALSE,  # asks for no gradient
        called(named("collections", "OrderedDict"), []),
        *more,
    ]
    return called(named("torch._utils", f"_rebuild_tensor_v{version}"), arguments)
