"""Where a store is, a parsed path or URL without credentials; and how objects are named there."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ckptkit.errors import InvalidNameError, UsageError

BUCKETS = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *BUCKETS)
TEMPORARY = ".tmp-"

_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az"}
# By fsspec links would be followed where something is deleted.
_ALIASES["local"] = "file"
# fsspec can read these, but nobody can list or write there.
_NO_STORES = ("http", "https", "data", "reference", "cached", "blockcache", "filecache")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_CHAINED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::.*://", re.DOTALL)
# What pathlib makes of a URL; a drive letter has one letter.
_COLLAPSED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_BUCKET = re.compile(r"[A-Za-z0-9._:-]+")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_USER = re.compile(r"[^/]*@")
_USER_AND_SECRET = re.compile(r"[^/@]*:[^/]*@")
_LEFTOVER = re.compile(r"\.tmp-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Location:
    """A place that can hold checkpoints: an absolute path, a name in this process' memory, a
    folder of a bucket, or whatever else fsspec knows.
    """

    scheme: str
    path: str

    def __post_init__(self) -> None:
        _refuse_unknown(self.scheme)
        if not self.path or "\0" in self.path:
            raise UsageError("a location must be a non-empty path without NUL", value=self.path)
        if self.scheme == "file":
            if not self.path.startswith("/"):
                raise UsageError(
                    "a file location must be an absolute path",
                    value=self.path,
                    hint="Location.parse makes paths absolute",
                )
            return
        # An absolute path behind some host-less scheme of fsspec keeps its slash.
        names = self.path if self.scheme in SCHEMES else self.path.removeprefix("/")
        if any(part in ("", ".", "..") for part in names.split("/")):
            what = "a bucket" if self.scheme in BUCKETS else "a name"
            raise UsageError(
                f"{self.scheme}:// needs {what} and plain names below it",
                value=str(self),
                hint=f"write {self.scheme}://name or {self.scheme}://name/folder, "
                "no empty, `.` or `..` parts",
            )
        # Engines fail at these, each in its own way, and not at once.
        bucket = self.path.partition("/")[0]
        if self.scheme in BUCKETS and not _BUCKET.fullmatch(bucket):
            raise UsageError(
                "no bucket can have this name",
                value=f"{self.scheme}://{bucket}",
                hint="it has letters, digits, dots and dashes",
            )
        if self.scheme in BUCKETS and _CONTROLS.search(self.path):
            raise UsageError(
                f"{self.scheme}:// must not be followed by control characters",
                value=str(self),
                hint="choose a name that can be printed",
            )

    @classmethod
    def parse(cls, text: str | os.PathLike[str] | Location) -> Location:
        """Read a path (`~` expanded, made absolute) or a URL such as `s3://bucket/folder`."""
        if isinstance(text, Location):
            return text
        path = os.fspath(text)
        if not isinstance(path, str):
            raise UsageError("a location must be text", value=path, hint="decode it: os.fsdecode")
        if not path or "\0" in path:
            raise UsageError("a location must be a non-empty path without NUL", value=path)
        if match := _URL.fullmatch(path):
            scheme, rest = _ALIASES.get(match[1].lower(), match[1].lower()), match[2]
            _refuse_unknown(scheme)
            if scheme != "file":
                # Elsewhere than at a server of objects a name before the host is no secret:
                # sftp://me@host/folder.
                secret = _USER_AND_SECRET if scheme not in SCHEMES else _USER
                if secret.match(rest):
                    raise UsageError(
                        "a location must not hold credentials",
                        where=f"{scheme}://…@…",
                        hint="pass them as storage options or in the environment, "
                        "and only the name here",
                    )
                return cls(scheme, rest.rstrip("/") or "/")
            path = unquote(rest).removeprefix("localhost")
            if not path.startswith("/"):
                raise UsageError(
                    "a file URL must name no host",
                    value=f"file://{unquote(rest)}",
                    hint=f"write file:///{unquote(rest)} or just the path",
                )
            if "\0" in path:
                raise UsageError("a location must be a non-empty path without NUL", value=path)
        elif match := _COLLAPSED_URL.match(path):
            raise UsageError(
                f"{match[1]}:/… is neither a URL nor a clear path",
                hint="pass URLs as text, pathlib drops a slash; write ./ before a path like this",
            )
        elif _CHAINED_URL.match(path):
            raise UsageError("chained URLs are not taken", hint="name one place, without `::`")
        try:
            whole = str(Path(path).expanduser().absolute())
        except RuntimeError as error:
            raise UsageError(
                "there is no such user's home", value=path, hint="write the path in full"
            ) from error
        # POSIX lets two leading slashes mean something else; nobody does.
        return cls("file", "/" + os.path.normpath(whole).lstrip("/"))

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
        """The location that holds this one; the topmost, such as a bucket, is its own parent."""
        above = self.path.rpartition("/")[0]
        top = "/" if self.scheme == "file" else self.path
        return Location(self.scheme, above or top)

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.path}"


def _refuse_unknown(scheme: str) -> None:
    if scheme in SCHEMES:
        return
    if scheme not in _NO_STORES:
        from fsspec.registry import known_implementations, registry  # noqa: PLC0415 — costs time

        if scheme in registry or scheme in known_implementations:
            return
    hint = "accepted are plain paths, file:///path, memory://name, s3://, gs:// and az://bucket"
    if scheme in ("http", "https"):
        hint = "for a server that speaks S3 write s3://bucket/folder, with the option endpoint"
    raise UsageError("no store for this kind of URL", value=f"{scheme}://", hint=hint)


def checked_key(key: str) -> str:
    """The key itself, or InvalidNameError when it is not a plain relative name."""
    # A lone surrogate has no bytes that could name a file.
    unnameable = "\0" in key or (not key.isascii() and key != key.encode(errors="ignore").decode())
    if unnameable or any(
        part in ("", ".", "..") or part.startswith(TEMPORARY) for part in key.split("/")
    ):
        raise InvalidNameError(
            "not a key",
            value=key,
            hint=f"no empty, `.` or `..` component, none that starts with {TEMPORARY}, no NUL",
        )
    return key


def deletable_key(key: str) -> str:
    """A key that may be deleted: any key, and what a store lists as left over."""
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
    """A new temporary name in the folder of a key, where a clean-up of that folder finds it."""
    folder, slash, _ = key.rpartition("/")
    return f"{folder}{slash}{new_temporary()}"


def is_leftover(name: str) -> bool:
    """Whether a single name is exactly as `new_temporary` makes them: others are not ours."""
    return bool(_LEFTOVER.fullmatch(name))


def is_temporary(name: str) -> bool:
    """Whether a single name is one the store made for its own use."""
    return name.startswith(TEMPORARY)
