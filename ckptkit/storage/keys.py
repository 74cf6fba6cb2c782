"""Keys: the relative names of objects, checked before they come near a path."""

from __future__ import annotations

import re
import secrets

from ckptkit.errors import InvalidNameError

TEMPORARY = ".tmp-"

_LEFTOVER = re.compile(r"\.tmp-[0-9a-f]{16}")


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


def deletable_key(key: str) -> str:
    """The same for a deletion, which takes what a store lists as left over as well."""
    folder, _, name = key.rpartition("/")
    if not is_leftover(name):
        return checked_key(key)
    if folder:
        checked_key(folder)
    return key


def folder_of(prefix: str) -> str:
    """A prefix without its trailing slash, checked."""
    return checked_key(prefix.removesuffix("/")) if prefix else ""


def new_temporary() -> str:
    """A name for the store's own use that nothing has."""
    return f"{TEMPORARY}{secrets.token_hex(8)}"


def temporary_beside(key: str) -> str:
    """The same in the folder of a key, where a clean-up of that finds it."""
    folder, slash, _ = key.rpartition("/")
    return f"{folder}{slash}{new_temporary()}"


def is_leftover(name: str) -> bool:
    """Whether a single name is exactly as `new_temporary` makes them: others are not ours."""
    return bool(_LEFTOVER.fullmatch(name))


def is_temporary(name: str) -> bool:
    """Whether a single name is one the store made for its own use."""
    return name.startswith(TEMPORARY)


def _is_bad(part: str) -> bool:
    return part in ("", ".", "..") or part.startswith(TEMPORARY)
