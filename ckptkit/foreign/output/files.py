"""Files of other formats, to be written: which bytes each has, and which tensors. Nothing
is written here; `checkpoint.export` fills such files from a step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.foreign.readers.safetensors import DTYPES, INDEX, METADATA, MOST_HEADER
from ckptkit.format.names import MODEL
from ckptkit.model import DType

_SPELLED = {dtype: spelled for spelled, dtype in DTYPES.items()}
_ALIGNED = 8
EMBEDDINGS = ("shared", "embed", "wte")
"""What the names of embeddings have in them, the first ones first."""


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
    """Of the checksums of these tensors."""


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
        for place, numbers in zip(count(1), shards, strict=False)
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
    for number in sorted(
        range(len(tensors)), key=lambda n: _natural(".".join(tensors[n].paths[0]))
    ):
        nbytes = tensors[number].nbytes
        if shards[-1] and nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(number)
        room -= nbytes
    return shards


def plain_name(names: Iterable[str]) -> str:
    """Of the names of one tied tensor the one that it is stored under: that of the embedding, for
    that is where transformers look for it.
    """

    def rank(name: str) -> int:
        return next((n for n, part in enumerate(EMBEDDINGS) if part in name), len(EMBEDDINGS))

    return min(names, key=rank)


def _file(key: str, tensors: Sequence[NewTensor], numbers: Iterable[int]) -> NewFile:
    """A safetensors file. Tensors with larger elements come first: then all are aligned."""
    order = sorted(numbers, key=lambda n: (-tensors[n].dtype.itemsize, _natural(tensors[n].name)))
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
    text += b" " * (-len(text) % _ALIGNED)
    if len(text) > MOST_HEADER:
        raise FormatError(
            f"the header would have {len(text)} bytes, {MOST_HEADER} are allowed",
            where=key,
            hint="write a folder of several files",
        )
    return NewFile(key, (len(text).to_bytes(8, "little") + text, *order))


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
