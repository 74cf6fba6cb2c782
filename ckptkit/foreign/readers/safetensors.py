"""safetensors: one file, the folder of a Hugging Face model, and the shards that DCP writes.

A file is 8 bytes for the length of a JSON header, the header, and raw little-endian elements in C
order. A folder has an index that says which tensor is in which file; without one, all files count,
or `model.safetensors` alone where it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.foreign.extents import Extent, ForeignArray, ForeignStep
from ckptkit.foreign.folder import Folder, config_of, parsed
from ckptkit.foreign.readers.dcp import with_optimizer
from ckptkit.format.names import join
from ckptkit.model import Box, DType, document

PLAIN = "model.safetensors"
INDEX = ".safetensors.index.json"
METADATA = "__metadata__"
SHARDING = "DCP_SHARDING_INFO"

# The shards that DCP writes are named alike, but a rank has not all of the files.
_OF_COUNT = re.compile(r"(?!shard-\d+-)(.*)-(\d{1,18})-of-(\d{1,18})\.safetensors")
_LENGTH_BYTES = 8
MOST_HEADER = 100_000_000  # as the format has it
# Read at once: most headers fit, and need no second request.
_FIRST_BYTES = 1 << 18
SPELLED = {
    "BOOL": "bool",
    **{
        f"{sign}{bits}": f"{sign_name}int{bits}"
        for sign, sign_name in (("I", ""), ("U", "u"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_safetensors(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder, or in its one file."""
    files, indexed = _files(folder)
    details: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, dict[str, Any], Box | None]]] = {}
    for key in files:
        header, where = read_header(folder, key), folder.where(key)
        said = header.pop(METADATA, None) or {}
        if not isinstance(said, dict):
            raise FormatError("not a map", where=f"{where}: {METADATA}", value=said)
        sharding = said.pop(SHARDING, None)
        if sharding is not None:
            sharding = parsed(document.text(sharding, f"{where}: {SHARDING}").encode(), where)
        if isinstance(said.get("format"), str):
            details.setdefault("format", said["format"])
        for name, entry in header.items():
            if indexed is not None and indexed.get(name) != key:
                continue  # the index counts: the file may be shared with another model
            # What DCP says in a shard of all that are in it: where in the whole tensor it is.
            known = sharding.get(name) if isinstance(sharding, dict) else None
            box = None
            if known is not None:
                offsets = known.get("saved_offsets") if isinstance(known, dict) else None
                at = f"{where}: {name}"
                box = Box(document.integers(offsets, at), document.integers(entry["shape"], at))
            parts.setdefault(name, []).append((key, entry, box))
    missing = sorted(set(indexed or ()) - parts.keys())
    if missing:
        raise FormatError(
            f"{len(missing)} tensors of the index are not in the files that it names",
            where=str(folder.store.location),
            value=missing[0],
            hint="the index is of other files; copy the folder again",
        )
    if unread := folder.unread(files):
        details["left_out"] = unread
    arrays = [_array(folder, name, found) for name, found in parts.items()]
    found = ForeignStep(
        format="safetensors",
        files={key: folder.size(key) for key in files},
        arrays=arrays,
        theirs={array.name: name for array, name in zip(arrays, parts, strict=True)},
        details=details,
        sizes=config_of(folder),
    )
    return with_optimizer(folder, found)


def read_header(folder: Folder, key: str) -> dict[str, Any]:
    """The header of a file; the bytes of each tensor are counted from the beginning of the file."""
    where = folder.where(key)
    size = folder.size(key)
    first = folder.read(key, 0, min(size, _FIRST_BYTES))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES or not 0 < length <= min(MOST_HEADER, size - _LENGTH_BYTES):
        raise FormatError(
            "not a safetensors file: its header does not fit into it",
            where=where,
            value=length,
            hint="it was cut short, or only its name says that it is one (a Git LFS pointer?)",
        )
    data = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(data) < length:
        data += folder.read(key, _LENGTH_BYTES + len(data), length - len(data))
    header = parsed(data, where)
    if not isinstance(header, dict):
        raise FormatError("the header is not a map", where=where, value=header)
    data_begins = _LENGTH_BYTES + length
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == METADATA:
            continue
        at = f"{where}: {name}"
        found = document.fields(entry, at, ("dtype", "shape", "data_offsets"))
        offsets = document.integers(found["data_offsets"], f"{at}: data_offsets")
        if len(offsets) != 2 or offsets[1] < offsets[0] or data_begins + offsets[1] > size:
            raise FormatError(
                f"the tensor reaches past the end of the file, which has {size} bytes",
                where=at,
                value=offsets,
                hint="it was cut short; copy it again",
            )
        entry["data_offsets"] = [data_begins + offset for offset in offsets]
        if offsets[1] > offsets[0]:
            spans.append((offsets[0], offsets[1], name))
    # The format has no holes: bytes that no tensor claims are those of one that was lost.
    spans = [(0, 0, "the header"), *sorted(spans), (size - data_begins, size, "the end")]
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin > end:
            raise FormatError(
                f"bytes that are of no tensor, between {name} and {other}",
                where=where,
                value=(end, begin),
                hint="the file is damaged, or was not written whole; copy it again",
            )
        if begin < end:
            raise FormatError(
                f"two tensors have the same bytes: {name} and {other}",
                where=where,
                value=(begin, end),
                hint="the file is damaged; copy it again",
            )
    return header


def _files(folder: Folder) -> tuple[list[str], dict[str, str] | None]:
    """The files that count, and by an index which tensor is in which of them."""
    if folder.only is not None and not folder.only.endswith(INDEX):
        return [folder.only], None
    indexes = [key for key in folder.files if key.endswith(INDEX) and "/" not in key]
    if folder.only is not None:
        indexes = [folder.only]
    if not indexes:
        files = sorted(k for k in folder.files if k.endswith(".safetensors") and "/" not in k)
        if PLAIN in files:
            return [PLAIN], None  # as transformers has it: others beside it are other models
        _check_count(folder, files)
        return files, None
    if len(indexes) > 1:
        # Of precisions or variants of one model: the plain name counts.
        indexes = [key for key in indexes if key == f"model{INDEX}"] or indexes
    if len(indexes) > 1:
        raise FormatError(
            "several models are in the folder",
            where=str(folder.store.location),
            value=sorted(indexes),
            hint=f"name the index of one, such as {folder.where(min(indexes))}",
        )
    plain = indexes[0].removesuffix(".index.json")
    if folder.only is None and plain in folder.files:
        # As transformers has it: `from_pretrained` looks for the plain name before the index.
        return [plain], None
    indexed = weight_map(folder, indexes[0])
    return sorted(set(indexed.values())), indexed


def weight_map(folder: Folder, index: str) -> dict[str, str]:
    """In which file each tensor of an index is; all these files are there."""
    where = folder.where(index)
    found = parsed(folder.read(index), where)
    indexed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(indexed, dict) or not indexed:
        raise FormatError("the index has no weight_map", where=where)
    for name, key in indexed.items():
        document.text(key, f"{where}: {name}")
        if key not in folder.files or "/" in key:
            raise FormatError(
                "a file of the index is missing",
                where=where,
                value=key,
                hint="it was not copied along; copy the folder again",
            )
    return indexed


def _check_count(folder: Folder, files: Iterable[str]) -> None:
    """Without an index the names say how many files there are: refuse where one is missing."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for key in files:
        if m := _OF_COUNT.fullmatch(key):
            numbers.setdefault((m[1], m[3]), set()).add(int(m[2]))
    for (name, count), there in numbers.items():
        gone = next((n for n in range(1, int(count) + 1) if n not in there), None)
        if gone is not None:
            raise FormatError(
                f"{len(there)} of {int(count)} files of the model are there",
                where=str(folder.store.location),
                value=f"no {name}-{gone:0{len(count)}}-of-{count}.safetensors",
                hint="copy the folder again, with its index",
            )


def _array(
    folder: Folder, name: str, found: list[tuple[str, dict[str, Any], Box | None]]
) -> ForeignArray:
    """One tensor, of which shards may be in several files."""
    extents: list[Extent] = []
    dtypes: set[str] = set()
    for key, entry, box in found:
        at = f"{folder.where(key)}: {name}"
        shape = document.integers(entry["shape"], f"{at}: shape")
        spelled = document.text(entry["dtype"], f"{at}: dtype")
        if spelled not in SPELLED:
            raise UnsupportedTypeError(
                "no such element type here",
                where=at,
                value=spelled,
                hint=f"supported are {', '.join(SPELLED)}",
            )
        dtype = DType.of(SPELLED[spelled])
        begin, end = entry["data_offsets"]
        if Box.whole(shape).size * dtype.itemsize != end - begin:
            raise FormatError(
                f"{end - begin} bytes are not a tensor of {shape} of {dtype}", where=at
            )
        if box is None and len(found) > 1:
            raise FormatError(
                "the tensor is in several files",
                where=at,
                value=sorted(key for key, _, _ in found),
                hint="name the one file that counts, or add the index of the model",
            )
        extents.append(Extent(box or Box.whole(shape), key, begin))
        dtypes.add(dtype.name)
    if len(dtypes) > 1:
        raise FormatError("its shards have several dtypes", where=name, value=sorted(dtypes))
    shape = whole_of([extent.box for extent in extents], name)
    return ForeignArray(join("model", name), shape, DType.of(dtypes.pop()), tuple(extents))


def whole_of(boxes: Sequence[Box], where: str) -> tuple[int, ...]:
    """The shape of a tensor of which only shards are told: it ends where the last one does. A shard
    that is missing in between leaves a hole, which is seen. One that is missing at the end is not.
    """
    if len({box.ndim for box in boxes}) > 1:
        raise FormatError("its shards differ in their number of dims", where=where)
    return tuple(max(along) for along in zip(*(box.stop for box in boxes), strict=True))
