"""A file of torch.save: a zip file with a pickle, and one member for each storage."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent, c_order, span_of
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles import read_pickle
from ckptkit.foreign.pickles.globals import DTYPES, STORAGES, Global, Placeholder
from ckptkit.foreign.spread import MeshPart, dtensor, sharded_tensor
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box, DType, document

# Of zip files: what torch writes is read here, and not by `zipfile`, whose own objects take as long
# to make as all else.
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_LIMIT16, _LIMIT32 = 0xFFFF, 0xFFFFFFFF
_ZIP64 = 1
# Read at once: the directory of most files is in it. A comment of 64 KiB fits, too.
_TAIL_BYTES = 1 << 17
_HINT = "it was cut short or changed; copy it again"
_SMALL_BYTES = 1 << 16
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
    name: str = ""
    """What the file was called when it was written, without its suffix; `archive` if by no name."""


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
    found: dict[str, tuple[int, object]] = {}
    for name in storages:
        member = members[f"{top}/data/{name}"]
        begin = offsets[member.name]
        content: object = member.crc or (key if member.size else b"")
        if not member.crc and 0 < member.size <= _SMALL_BYTES:
            # Torch may be told to compute no checksums. Then there is a zero in place of each.
            content = folder.read(key, begin, member.size)
        found[name] = (begin, content)
    reader = _Tensors(key, where, found, rank)
    return TorchFile(reader.tree(value), reader.spreads, top)


def storage_of(said: Any, where: str) -> Storage:
    """A storage by its persistent id."""
    if not (isinstance(said, tuple) and len(said) == 5 and said[0] == "storage"):
        raise FormatError("a persistent id that is no storage", where=where)
    _, kind, key, _, count = said
    if not isinstance(kind, Global) or kind.name not in STORAGES or type(key) is not str:
        raise FormatError("a storage of a kind that is not read here", where=where)
    return Storage(key, STORAGES[kind.name], document.integer(count, f"{where}: storage"))


@dataclass(slots=True)
class _Tensors:
    """Puts tensors in the place of the placeholders of a value."""

    key: str
    where: str
    storages: Mapping[str, tuple[int, object]]
    """Where each begins, and what is equal for those of equal bytes."""
    rank: int
    spreads: dict[int, MeshPart] = field(default_factory=dict)

    def tree(self, value: Any) -> Any:
        def made(leaf: Any, path: str) -> Any:
            is_one = isinstance(leaf, Placeholder)
            return self.tensor(leaf, f"{self.where}: {path}") if is_one else leaf

        return changed(value, made)

    def tensor(self, said: Any, where: str) -> Any:
        """The tensor that a placeholder is; the placeholder itself where it is none."""
        match said.kind if isinstance(said, Placeholder) else "":
            case "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return self.tensor(said.args[0], where) if said.args else said
            case "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return self.stored(said, where)
            case "_rebuild_from_type_v2" if len(said.args) == 4:
                return self.subclass(said, where)
            case "scalar" | "_reconstruct":
                return _numpy_value(said, where)
        return said

    def stored(self, said: Placeholder, where: str) -> StateTensor:
        storage, offset, shape, strides, dtype = tensor_of(said, where)
        begin, equal = self.storages[storage.key]
        begin += offset * dtype.itemsize
        extent = Extent(Box.whole(shape), self.key, begin, strides)
        looks = (shape, strides, dtype.name)
        return StateTensor(
            shape,
            dtype,
            (extent,),
            identity=(self.key, begin, *looks),
            content=(equal, storage.count, offset, *looks),
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
            spread = dtensor(fields.get("_spec"), self.rank, local.shape, where, self.tensor)
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
    # A part without elements may begin anywhere.
    end = (offset + span_of(shape, strides)) * dtype.itemsize if count else 0
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
    order = zip(shape, strides, c_order(shape), strict=True)
    is_in_order = not count or all(n < 2 or step == own for n, step, own in order)
    return storage, offset, shape, None if is_in_order else strides, dtype


def dtype_of(said: Any, where: str) -> DType:
    """Our type of elements for one of torch."""
    if type(said) is not str or said not in DTYPES:
        raise FormatError("elements of a type that is not read here", where=where, value=said)
    return DTYPES[said]


def _numpy_value(said: Placeholder, where: str) -> Any:
    """The scalar or the array of numpy that a placeholder is; only numbers have one."""
    is_scalar = said.kind == "scalar" and len(said.args) == 2
    parts = (1, (), said.args[0], False, said.args[1]) if is_scalar else said.state
    if not isinstance(parts, tuple) or len(parts) != 5:
        raise FormatError("not an array of numpy", where=where)
    _, shape, kind, by_columns, data = parts
    code = kind.args[0] if isinstance(kind, Placeholder) and kind.args else None
    told = kind.state if isinstance(kind, Placeholder) else None
    order = (*told, None, None)[1] if type(told) is tuple else "|"
    if (
        type(code) is not str
        or not re.fullmatch(r"[biufc]\d{1,2}", code)
        or order not in ("<", "|")
    ):
        raise FormatError("an array of numpy that is not of numbers", where=where, value=code)
    if type(data) is not bytes or type(shape) is not tuple:
        raise FormatError("not an array of numpy", where=where)
    try:
        flat = np.frombuffer(data, np.dtype(code))
        found = flat.reshape(shape, order="F" if by_columns else "C").copy()
    except (ValueError, TypeError) as error:
        raise FormatError("not an array of numpy", where=where) from error
    return found[()] if is_scalar else found


def plain(value: Any, where: str) -> Any:
    """A value of a pickle without storages: what numpy has made in it are arrays and numbers."""
    return _Tensors("", where, {}, 0).tree(value)


def changed(tree: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """A tree of dictionaries, lists and tuples with other leaves; `change` is told where one is."""
    if isinstance(tree, dict):
        return {k: changed(v, change, f"{path}.{k}" if path else str(k)) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(changed(item, change, f"{path}[{n}]") for n, item in enumerate(tree))
    return change(tree, path)


def is_whole(data: bytes) -> bool:
    """Whether it is what torch.save wrote, by its checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            # None is compressed, nor in another: so this reads no more than there is.
            return (
                all(member.compress_type == zipfile.ZIP_STORED for member in members)
                and sum(member.file_size for member in members) <= len(data)
                and archive.testzip() is None
            )
    except (zipfile.BadZipFile, EOFError, LookupError, RuntimeError, ValueError, struct.error):
        return False


@dataclass(frozen=True, slots=True)
class Member:
    """One file in a zip file, as its directory has it."""

    name: str
    header: int
    """Where its local header begins."""
    size: int
    is_plain: bool
    """Neither compressed nor encrypted."""
    crc: int


def directory_of(folder: Folder, key: str) -> dict[str, Member]:
    """The members of a zip file by name."""
    where, size = folder.where(key), folder.size(key)
    tail = folder.read(key, max(0, size - _TAIL_BYTES))
    begins = size - len(tail)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise FormatError("not a whole zip file: its directory is missing", where=where, hint=_HINT)
    *_, count, length, start, _ = _END.unpack_from(tail, at)
    end = begins + at
    if count == _LIMIT16 or _LIMIT32 in (length, start):
        locator = tail[max(0, at - _LOCATOR.size) : at]
        if len(locator) < _LOCATOR.size or locator[:4] != b"PK\6\7":
            raise FormatError("the zip file has no zip64 directory", where=where, hint=_HINT)
        _, _, end, _ = _LOCATOR.unpack(locator)
        # A file that was put before it moves no offset here: torch writes none like that.
        raw = folder.read(key, end, _END64.size)
        mark, *_, count, length, start = _END64.unpack(raw)
        if mark != b"PK\6\6":
            raise FormatError("the zip file has no zip64 directory", where=where, hint=_HINT)
    if start + length > end or count * _CENTRAL.size > length:
        raise FormatError("the directory of the zip file is not in it", where=where, hint=_HINT)
    inside = start >= begins
    data = tail[start - begins : start - begins + length] if inside else None
    return _members(folder.read(key, start, length) if data is None else data, count, where)


def _members(data: bytes, count: int, where: str) -> dict[str, Member]:
    found: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(data):
            raise FormatError("the directory of the zip file ends early", where=where, hint=_HINT)
        mark, _, _, flags, method, _, _, crc, packed, size, names, extras, comment, *_, header = (
            _CENTRAL.unpack_from(data, at)
        )
        after = at + _CENTRAL.size + names + extras + comment
        raw = data[at + _CENTRAL.size : at + _CENTRAL.size + names]
        if mark != b"PK\1\2" or after > len(data):
            raise FormatError("not a directory of a zip file", where=where, hint=_HINT)
        name = raw.decode("utf-8", "replace")
        if _LIMIT32 in (packed, size, header):
            begin = at + _CENTRAL.size + names
            wide = _wide(data[begin : begin + extras], where)
            size = wide.pop(0) if size == _LIMIT32 and wide else size
            packed = wide.pop(0) if packed == _LIMIT32 and wide else packed
            header = wide.pop(0) if header == _LIMIT32 and wide else header
        if name in found:
            raise FormatError("a member is twice in the zip file", where=where, value=name)
        is_plain = method == 0 and not flags & 1 and packed == size
        found[name] = Member(name, header, size, is_plain, crc)
        at = after
    return found


def _wide(extras: bytes, where: str) -> list[int]:
    """The numbers of 64 bits among the extra fields of a member."""
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<HH", extras, at)
        count = length // 8  # behind them there may be the number of a disk
        if kind == _ZIP64 and at + 4 + 8 * count <= len(extras):
            return list(struct.unpack_from(f"<{count}Q", extras, at + 4))
        at += 4 + length
    raise FormatError("a large member of the zip file does not say its size", where=where)


def offsets_of(folder: Folder, key: str, members: Iterable[Member]) -> dict[str, int]:
    """Where the bytes of each member begin, which only the header in front of them says."""
    wanted = sorted(members, key=lambda member: member.header)
    where, size = folder.where(key), folder.size(key)
    for member in wanted:
        if not member.is_plain:
            raise FormatError(
                "the member is compressed or encrypted, which torch.save never does",
                where=f"{where}: {member.name}",
                hint="unpack the file, and zip it again without compression (zip -0)",
            )
    heads = folder.read_many(
        key, [(each.header, _LOCAL.size + len(each.name.encode())) for each in wanted]
    )
    found: dict[str, int] = {}
    for member, head in zip(wanted, heads, strict=True):
        begin = local_end(head, member.name)
        if begin is None or member.header + begin + member.size > size:
            raise FormatError(
                "the zip file has no such member where its directory says",
                where=f"{where}: {member.name}",
                hint=_HINT,
            )
        found[member.name] = member.header + begin
    return found


def local_end(head: bytes, name: str | None = None) -> int | None:
    """How long the local header is that some bytes begin with; None where it is none, or not that
    of a member of this name that is stored as it is.
    """
    if len(head) < _LOCAL.size:
        return None
    mark, _, flags, method, *_, names, extras = _LOCAL.unpack_from(head)
    if mark != b"PK\3\4" or method or flags & 1:
        return None
    if name is not None and head[_LOCAL.size : _LOCAL.size + names] != name.encode():
        return None
    return int(_LOCAL.size + names + extras)


def local_name(head: bytes) -> bytes:
    """The name in a local header that `local_end` knows."""
    length = int(_LOCAL.unpack_from(head)[-2])
    return head[_LOCAL.size : _LOCAL.size + length]
