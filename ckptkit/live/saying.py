"""How things are said in logs and to other ranks."""

from __future__ import annotations


def readable(nbytes: float) -> str:
    """A number of bytes, such as `1.25 GB`."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def in_one_line(error: BaseException) -> str:
    """An error as other ranks are told of it."""
    return f"{type(error).__name__}: {error}".replace("\n", "; ")
