"""Where a store is: a parsed path or URL, without credentials."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ckptkit.errors import UsageError

SCHEMES = ("file", "memory")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What pathlib makes of a URL; a drive letter has one letter.
_COLLAPSED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_USER = re.compile(r"^[^/@]*@")


@dataclass(frozen=True, slots=True)
class Location:
    """A place that can hold checkpoints: an absolute path, or a name in this process' memory."""

    scheme: str
    path: str

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise _unknown_scheme(self.scheme)
        if not self.path or "\0" in self.path:
            raise UsageError("a location must be a non-empty path without NUL", value=self.path)
        if self.scheme == "file" and not self.path.startswith("/"):
            raise UsageError(
                "a file location must be an absolute path",
                value=self.path,
                hint="Location.parse makes paths absolute",
            )

    @classmethod
    def parse(cls, text: str | os.PathLike[str] | Location) -> Location:
        """Read a path (`~` expanded, made absolute), `file:///x` or `memory://name/x`."""
        if isinstance(text, Location):
            return text
        path = os.fspath(text)
        if not isinstance(path, str):
            raise UsageError("a location must be text", value=path, hint="decode it: os.fsdecode")
        if not path or "\0" in path:
            raise UsageError("a location must be a non-empty path without NUL", value=path)
        if match := _URL.fullmatch(path):
            return _from_url(match[1].lower(), match[2])
        if match := _COLLAPSED_URL.match(path):
            raise UsageError(
                f"{match[1]}:/… is neither a URL nor a clear path",
                hint="pass URLs as text, pathlib drops a slash; write ./ before a path like this",
            )
        return cls("file", _absolute(path))

    def __truediv__(self, name: str) -> Location:
        parts = name.split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise UsageError(
                "the name is not a plain relative path",
                where=str(self),
                value=name,
                hint="no empty, `.` or `..` components, no leading or trailing slash, no NUL",
            )
        return Location(self.scheme, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The location that holds this one; the topmost is its own parent."""
        above = self.path.rpartition("/")[0]
        top = "/" if self.scheme == "file" else self.path
        return Location(self.scheme, above or top)

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.path}"


def _from_url(scheme: str, rest: str) -> Location:
    if scheme not in SCHEMES:
        raise _unknown_scheme(scheme)
    rest = _USER.sub("", rest)
    if scheme == "file":
        return _from_file_url(unquote(rest))
    names = rest.rstrip("/")
    if not names or any(part in ("", ".", "..") for part in names.split("/")):
        raise UsageError(
            "a memory location needs a plain name",
            value=f"memory://{rest}",
            hint="write memory://name or memory://name/folder",
        )
    return Location("memory", names)


def _from_file_url(rest: str) -> Location:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(
            "a file URL must name no host",
            value=f"file://{rest}",
            hint=f"write file:///{rest} or just the path",
        )
    if "\0" in path:
        raise UsageError("a location must be a non-empty path without NUL", value=path)
    return Location("file", _absolute(path))


def _absolute(path: str) -> str:
    try:
        whole = str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise UsageError(
            "there is no such user's home", value=path, hint="write the path in full"
        ) from error
    # POSIX lets two leading slashes mean something else; nobody does.
    return "/" + os.path.normpath(whole).lstrip("/")


def _unknown_scheme(scheme: str) -> UsageError:
    return UsageError(
        "no store for this kind of URL",
        value=f"{scheme}://",
        hint="accepted are plain paths, file:///path and memory://name",
    )
