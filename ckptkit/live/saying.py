"""How things are said in logs."""

from __future__ import annotations


def readable(nbytes: float) -> str:
    """A number of bytes, such as `1.25 GB`."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
