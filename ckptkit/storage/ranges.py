"""Checks of byte ranges and buffers that all stores share."""

from __future__ import annotations

from ckptkit.errors import CorruptionError, FormatError, UsageError


def checked_range(where: str, size: int, start: int, length: int | None) -> int:
    """The number of bytes to read, once they are known to lie inside the object."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(
            "a byte range must not be negative",
            where=where,
            value=(start, length),
            hint="count from the start",
        )
    count = size - start if length is None else length
    if count < 0 or start + count > size:
        raise CorruptionError(
            f"the object has {size} bytes, too few for bytes {start} to {start + max(count, 0)}",
            where=where,
            hint="it was cut short, or what points into it is wrong; restore it from a copy",
        )
    return count


def checked_size(where: str, size: int, most: int) -> int:
    """The size of an object that is read whole, once it is known to be bounded."""
    if size > most:
        raise FormatError(
            f"the object has {size} bytes, at most {most} can be right",
            where=where,
            hint="it is not what its name says; restore it from a copy",
        )
    return size


def as_bytes(where: str, data: object) -> memoryview:
    """A flat view of the bytes of any contiguous buffer."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise UsageError(
            "the data must be one contiguous run of bytes",
            where=where,
            hint="copy it first: bytes(data)",
        ) from error
