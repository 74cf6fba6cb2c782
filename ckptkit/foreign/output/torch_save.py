"""A file of torch.save, to be written: a zip file with a pickle, and in it one member for each
tensor. The pickle is made of the few opcodes that torch's own loader of weights allows; nothing of
torch is needed for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from isal import isal_zlib

from ckptkit.foreign.output.files import Checked, NewFile, NewFiles, NewTensor
from ckptkit.format.pack import end_records

_TOP = "archive"
_ALIGNED = 64
# From here on numbers are in 64 bits, elsewhere; and what stands where they would be.
_LARGE = _ELSEWHERE = 0xFFFFFFFF
_DATE = 0x21  # the first day that a zip file knows
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
# The checksum of a tensor is known when it has been written: it comes behind it.
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
    """A member of the zip file: `content` is its bytes, or the number of a tensor."""

    name: bytes
    header_offset: int
    nbytes: int
    content: bytes | int


def torch_file(key: str, tensors: Sequence[NewTensor]) -> NewFiles:
    """One file that `torch.load(weights_only=True)` reads as a dictionary of all tensors; tied ones
    share their memory.
    """
    contents: list[tuple[str, bytes | int]] = [
        ("data.pkl", _pickle(tensors)),
        ("byteorder", b"little"),
        *((f"data/{number}", number) for number in range(len(tensors))),
        ("version", b"3\n"),
    ]
    members: list[_Member] = []
    pieces: list[bytes | int | Checked] = []
    end = 0
    for inner, content in contents:
        nbytes = len(content) if isinstance(content, bytes) else tensors[content].nbytes
        member = _Member(f"{_TOP}/{inner}".encode(), end, nbytes, content)
        header = _local(member)
        members.append(member)
        pieces += [header, content]
        end += len(header) + nbytes
        if isinstance(content, int):
            checksum = Checked(len(_behind(nbytes, [0])), (content,), partial(_behind, nbytes))
            pieces.append(checksum)
            end += checksum.nbytes
    numbers = tuple(range(len(tensors)))
    closing = partial(_directory, members, end)
    pieces.append(Checked(len(closing([0] * len(numbers))), numbers, closing))
    return NewFiles((NewFile(key, tuple(pieces)),))


def _local(member: _Member) -> bytes:
    """All bytes from a member's header up to its data, which begins where torch wants it."""
    name, at, nbytes, content = member
    is_large = nbytes >= _LARGE
    known = nbytes if isinstance(content, bytes) else 0
    extra = struct.pack("<HHQQ", 1, 16, known, known) if is_large else b""
    padding = -(at + _LOCAL.size + len(name) + len(extra) + 4) % _ALIGNED
    extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
    crc, size, flags = 0, _ELSEWHERE if is_large else 0, _BEHIND
    if isinstance(content, bytes):
        crc, flags = isal_zlib.crc32(content), 0
        size = _ELSEWHERE if is_large else nbytes
    version = 45 if is_large else 20
    fixed = (b"PK\3\4", version, flags, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*fixed) + name + extra


def _behind(nbytes: int, crcs: Sequence[int]) -> bytes:
    """What comes behind a tensor."""
    form = "<4sIQQ" if nbytes >= _LARGE else "<4sIII"
    return struct.pack(form, b"PK\7\10", crcs[0], nbytes, nbytes)


def _directory(members: Sequence[_Member], offset: int, crcs: Sequence[int]) -> bytes:
    """The end of the file, which begins at `offset`."""
    found = bytearray()
    for name, at, nbytes, content in members:
        large = [number for number in (nbytes, nbytes) if nbytes >= _LARGE]
        large += [at] if at >= _LARGE else []
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        crc, flags = (
            (isal_zlib.crc32(content), 0)
            if isinstance(content, bytes)
            else (crcs[content], _BEHIND)
        )
        size, version = _ELSEWHERE if nbytes >= _LARGE else nbytes, 45 if large else 20
        offset32 = _ELSEWHERE if at >= _LARGE else at
        found += _CENTRAL.pack(
            *(b"PK\1\2", version, version, flags, 0, 0, _DATE, crc, size, size),
            *(len(name), len(extra), 0, 0, 0, 0, offset32),
        )
        found += name + extra
    return bytes(found) + end_records(len(members), len(found), offset)


def _pickle(tensors: Sequence[NewTensor]) -> bytes:
    """A dictionary of tensors, each on the storage of its number."""
    found = bytearray(b"\x80\x02}(")
    for number, tensor in enumerate(tensors):
        value = _tensor(number, tensor)
        for name in (tensor.name, *tensor.tied):
            found += _text(name) + value
    return bytes(found) + b"u."


def _tensor(number: int, tensor: NewTensor) -> bytes:
    dtype, elements = tensor.dtype, tensor.nbytes // tensor.dtype.itemsize
    storage, count, more, version = "torch.storage\nUntypedStorage", tensor.nbytes, b"", 3
    if dtype.name in _STORAGES:
        storage, count, version = f"torch\n{_STORAGES[dtype.name]}Storage", elements, 2
    else:
        more = _global(f"torch\n{dtype.torch}")
    strides = [1]
    for extent in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    steps = tuple(reversed(strides)) if tensor.shape else ()
    place = (_text("storage"), _global(storage), _text(str(number)), _text("cpu"), _integer(count))
    arguments = (
        _tuple(place) + b"Q",
        _integer(0),
        _tuple(map(_integer, tensor.shape)),
        _tuple(map(_integer, steps)),
        b"\x89",  # asks for no gradient
        _global("collections\nOrderedDict") + b")R",
        more,
    )
    return _global(f"torch._utils\n_rebuild_tensor_v{version}") + _tuple(arguments) + b"R"


def _global(module_and_name: str) -> bytes:
    return f"c{module_and_name}\n".encode()


def _tuple(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _integer(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x09" + number.to_bytes(9, "little")
