"""Keys: the relative names of objects, checked before they come near a path."""

from __future__ import annotations

from ckptkit.errors import InvalidNameError

TEMPORARY = ".tmp-"


def checked_key(key: str) -> str:
    """The key itself, or InvalidNameError when it is not a plain relative name."""
    # A lone surrogate has no bytes that could name a file.
    unnameable = "\0" in key or (not key.isascii() and key != key.encode(errors="ignore").decode())
    if unnameable or any(_is_bad(part) for part in key.split("/")):
        raise InvalidNameError(
            "not a key",
            value=key,
            hint=f"no empty, `.` or `..` component, none that starts with {TEMPORARY}, no NUL",
        )
    return key


def folder_of(prefix: str) -> str:
    """A prefix without its trailing slash, checked."""
    return checked_key(prefix.removesuffix("/")) if prefix else ""


def is_temporary(name: str) -> bool:
    """Whether a single name is one the store made for its own use."""
    return name.startswith(TEMPORARY)


def _is_bad(part: str) -> bool:
    return part in ("", ".", "..") or part.startswith(TEMPORARY)
