"""What zarr-python needs to read a step: its keys as a read-only Zarr v3 store, and the dtypes that
zarr-python lacks (bfloat16, the 8-bit floats, complex of two float16). Never our own data path.

zarr-python 3.1 does not load the entry point group `zarr.data_type` by itself, so `import
ckptkit` registers them too; `ckpt` does so where it opens a step by zarr.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Self, TypeGuard

import numpy as np
import numpy.typing as npt
import zarr.dtype
import zarr.errors
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.dtype import ZDType, data_type_registry

from ckptkit.errors import UsageError
from ckptkit.format.arrays import (
    DOCUMENT,
    GROUP_DOCUMENT,
    ArrayInfo,
    array_document,
    chunk_key,
    key_of,
    presented_grid,
)
from ckptkit.format.names import ancestors
from ckptkit.model import DTYPES, Box, DType

Values = npt.NDArray[Any]

# zarr 3.1 has it in zarr.dtype, and later ones warn of whoever looks there.
_NAME = "DataTypeValidationError"
_WrongDType: type[ValueError] = getattr(zarr.errors, _NAME, None) or getattr(zarr.dtype, _NAME)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


class ZarrView(Store):
    """Every key of a step, tied arrays under each of their names; a chunk that is not there is
    an error, never a fill value.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(
        self, location: str, arrays: Mapping[str, ArrayInfo], read: Callable[[str, Box], Values]
    ) -> None:
        """A view of the step at `location`, whose elements `read` gives, box by box."""
        super().__init__(read_only=True)
        self._location = location
        self._arrays = arrays
        self._read = read
        self._groups = {g for name in arrays for g in ancestors(name)} | {""}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrView) and other._read == self._read

    def __hash__(self) -> int:
        return hash(self._read)

    def __str__(self) -> str:
        return f"ckptkit:{self._location}"

    def read_key(self, key: str) -> bytes | None:
        """The bytes of a key, or None where a step has no such key."""
        name, _, last = key.rpartition("/")
        if last == DOCUMENT and key == key_of(name):
            if name in self._groups:
                return GROUP_DOCUMENT
            info = self._arrays.get(name)
            return None if info is None else array_document(info, presented_grid(info))
        chunk = self._chunk(key)
        if chunk is None:
            return None
        name, index = chunk
        array = self._arrays[name]
        grid = presented_grid(array)
        box = grid.box(index)
        stored = np.zeros(grid.chunk_shape, dtype=array.dtype.bits)
        inside: Any = (*(slice(0, extent) for extent in box.shape), ...)
        stored[inside] = self._read(name, box).view(array.dtype.bits)
        return stored.tobytes()

    def keys(self) -> Iterable[str]:
        """All keys."""
        yield from map(key_of, sorted(self._groups))
        for name in self._arrays:
            yield from self._keys_of(name)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key, or a range of it."""
        data = await asyncio.to_thread(self.read_key, key)
        if data is None:
            return None
        part = slice(None)
        match byte_range:
            case RangeByteRequest(start, end):
                part = slice(start, end)
            case OffsetByteRequest(offset):
                part = slice(offset, None)
            case SuffixByteRequest(suffix):
                part = slice(max(0, len(data) - suffix), None)
        return prototype.buffer.from_bytes(data[part])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several values or ranges."""
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        """Whether a step has the key."""
        name, _, last = key.rpartition("/")
        if last == DOCUMENT and key == key_of(name):
            return name in self._groups or name in self._arrays
        return self._chunk(key) is not None

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that begin so."""
        for key in self.keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a prefix."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        name, mark, _ = f"/{start}".rpartition("/c/")
        if mark and name[1:] in self._arrays:
            keys: Iterable[str] = self._keys_of(name[1:])
        else:
            # Of the chunks only that there are some: a step may have millions.
            with_chunks = (key for key, array in self._arrays.items() if array.grid.chunk_count)
            nodes = map(key_of, chain(self._groups, self._arrays))
            keys = chain(nodes, (f"{key}/c" for key in with_chunks))
        seen = {key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)}
        for child in sorted(seen):
            yield child

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        """Refused: a step never changes."""
        raise UsageError("a checkpoint is read-only", where=str(self), value=key)

    async def delete(self, key: str) -> None:
        """Refused: a step never changes."""
        raise UsageError("a checkpoint is read-only", where=str(self), value=key)

    def _keys_of(self, name: str) -> Iterator[str]:
        yield key_of(name)
        grid = presented_grid(self._arrays[name])
        # `ndindex` refuses some shapes that have no index.
        for index in np.ndindex(*grid.counts) if grid.chunk_count else ():
            yield chunk_key(name, index)

    def _chunk(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        name, mark, numbers = f"{key}/".rpartition("/c/")
        if not mark or name not in self._arrays:
            return None
        parts = [part for part in numbers.split("/") if part]
        counts = presented_grid(self._arrays[name]).counts
        if len(parts) != len(counts) or not all(_NUMBER.fullmatch(part) for part in parts):
            return None
        index = tuple(map(int, parts))
        inside = all(i < count for i, count in zip(index, counts, strict=True))
        return (name, index) if inside and key == chunk_key(name, index) else None


class _Plugin(ZDType[Any, Any]):
    """One ckptkit dtype, presented to zarr-python."""

    known: ClassVar[DType]
    dtype_cls = np.dtype

    @property
    def item_size(self) -> int:
        return self.known.itemsize

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == cls.known.numpy)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """For the numpy dtype that it wraps, and for no other."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise _WrongDType(f"{dtype} is not {cls.known.name}")

    def to_native_dtype(self) -> Any:
        return self.known.numpy

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise _WrongDType(f"{cls.known.name} is not in Zarr v2, {data} is something else")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls.known.name:
            return cls()
        raise _WrongDType(f"{data} is not {cls.known.name}")

    def to_json(self, zarr_format: Any) -> Any:
        if zarr_format != 3:
            raise _WrongDType(f"{self.known.name} is not in Zarr v{zarr_format}")
        return self.known.name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.number, np.void, tuple))

    def cast_scalar(self, data: object) -> Any:
        return np.array(data, dtype=self.known.numpy)[()]

    def default_scalar(self) -> Any:
        return np.zeros((), dtype=self.known.numpy)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """A fill value: a number, a pair, a named value or the bits in hexadecimal."""
        if isinstance(data, str) and data.startswith("0x"):
            raw = int(data, 16).to_bytes(self.known.itemsize, "little")
            return np.frombuffer(raw, dtype=self.known.numpy)[0]
        return self.cast_scalar(tuple(data) if isinstance(data, list) else float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The bits in hexadecimal, which says every value of every one of these types."""
        raw = np.asarray(data, dtype=self.known.numpy).tobytes()
        if self.known.name.startswith("complex"):
            return [float(part) for part in np.frombuffer(raw, "<f2")]
        return f"0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x}"


def _plugin(name: str) -> type[_Plugin]:
    attributes = {"known": DTYPES[name], "_zarr_v3_name": name, "__module__": __name__}
    return type(f"Zarr_{name}", (_Plugin,), attributes)


BFloat16 = _plugin("bfloat16")
Float8E4M3FN = _plugin("float8_e4m3fn")
Float8E5M2 = _plugin("float8_e5m2")
Float8E4M3FNUZ = _plugin("float8_e4m3fnuz")
Float8E5M2FNUZ = _plugin("float8_e5m2fnuz")
Float8E8M0FNU = _plugin("float8_e8m0fnu")
ComplexFloat16 = _plugin("complex_float16")


def register() -> None:
    """Make zarr-python read and write them; what somebody else has registered stays."""
    for plugin in _Plugin.__subclasses__():
        if plugin.known.name not in data_type_registry.contents:
            data_type_registry.register(plugin.known.name, plugin)
