"""The address of a store: where it is, a parsed path or URL without credentials; the options that
reach it, and with which credentials: what nobody may print; and how objects are named there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

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
        except FileNotFoundError as error:
            raise UsageError(
                "the current folder is gone", value=path, hint="change to one that is there"
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
    return f"{TEMPORARY}{os.urandom(8).hex()}"


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


# How a store is reached.

Options = Mapping[str, object]
NO_OPTIONS: Options = MappingProxyType({})

ENGINES = ("obstore", "fsspec")
ENGINE_VARIABLE = "CKPTKIT_STORAGE_ENGINE"
# Every server of the S3 kind refuses parts that are smaller, unless they are the last.
SMALLEST_PART = 5 << 20

# Bytes per second: an upload that is slower than this fails.
LEAST_RATE = 1e6
# Of a line that is slow, and not of a connection that is broken.
READ_RATE = 4e6

_CONNECT_SECONDS = 5.0
_KEYS = ("access_key", "secret_key", "session_token")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9} | {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]+)?) *([A-Za-z]*)")
_BLANK = re.compile(r"[^!-~]")
_IPV4 = re.compile(r"//[0-9.]+(?::[0-9]+)?(?:/|$)")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Address:
    """A location, and the storage options that reach it."""

    location: Location
    options: Options = field(default_factory=lambda: NO_OPTIONS, repr=False, hash=False)

    def __reduce__(self) -> tuple[type[Address], tuple[Location, dict[str, object]]]:
        # A mapping proxy cannot be pickled.
        return Address, (self.location, dict(self.options))

    def __str__(self) -> str:
        return str(self.location)


@dataclass(frozen=True, slots=True)
class Settings:
    """The storage options: how a server is reached. None leaves it to the environment and the
    engine.
    """

    engine: str | None = None
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    """A profile of `~/.aws`."""
    anonymous: bool = False
    path_style: bool | None = None
    """True: the bucket is in the path, False: in the host name."""
    http: bool = False
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    """Seconds until a request is answered, or goes on being answered."""
    deadline: float = 300.0
    """Seconds for one operation with its retries."""
    part_size: int = 16 << 20
    """Bytes per part of an upload."""
    concurrency: int = 16
    """How many requests at a time."""
    request_bytes: int = 16 << 20
    gap_bytes: int = 256 << 10
    others: Options = field(default_factory=lambda: NO_OPTIONS, repr=False, hash=False)
    """What only the file system behind fsspec understands."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be shown."""
        told = (self.access_key, self.secret_key, self.session_token)
        found = (*told, *(os.environ.get(name) for name in _SECRETS))
        return tuple(secret for secret in found if secret)

    @property
    def is_plain(self) -> bool:
        """Whether connections are not encrypted."""
        return self.endpoint.startswith("http://") if self.endpoint else self.http

    @property
    def connect_timeout(self) -> float:
        """Seconds until a server has to take a connection."""
        return min(_CONNECT_SECONDS, self.timeout)

    @property
    def stall_seconds(self) -> float:
        """How long nothing may come of an answer."""
        return min(self.timeout, self.deadline)

    @property
    def answer_seconds(self) -> float:
        """How long an answer may take that keeps coming, among as many as are asked for at a time;
        one that has taken that long had better be asked for again.
        """
        coming = self.concurrency * self.request_bytes
        return min(self.timeout + coming / READ_RATE, self.deadline)

    def extra_seconds(self, nbytes: int) -> float:
        """How much longer a request may take while so many bytes share the way to the server."""
        return nbytes / LEAST_RATE


OPTION_NAMES = tuple(field.name for field in fields(Settings) if field.name != "others")


def checked_names(options: Options) -> None:
    """UsageError for an option that there is not; what it was set to is not shown."""
    if unknown := sorted(str(name) for name in options if name not in OPTION_NAMES):
        raise UsageError(
            "no such storage option" if len(unknown) == 1 else "no such storage options",
            value=", ".join(unknown),
            hint=f"there are {', '.join(OPTION_NAMES)}",
        )


def read_settings(
    scheme: str, options: Options, environment: Mapping[str, str] = os.environ
) -> Settings:
    """The settings for one kind of store; all values may be text, as a command line gives them."""
    if scheme in BUCKETS:
        checked_names(options)
    given = {
        name: _VALUES.get(name, _text)(name, options[name])
        for name in OPTION_NAMES
        if options.get(name) is not None
    }
    keys = [name for name in _KEYS if name in given]
    for name in keys:
        if not given[name]:
            raise UsageError(
                f"the storage option {name} is empty",
                hint="leave it out to take the credentials of the environment",
            )
    given = {name: value for name, value in given.items() if value != ""}

    def found(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    if scheme in BUCKETS and "engine" not in given:
        given["engine"] = found(ENGINE_VARIABLE)
    if scheme == "s3":
        given = {"endpoint": found(*_ENDPOINTS), "region": found(*_REGIONS), **given}
    engine, endpoint = given.get("engine"), given.get("endpoint")
    if engine not in (None, *ENGINES):
        raise UsageError(
            "no such storage engine",
            value=engine,
            hint=f"the option engine and {ENGINE_VARIABLE} take {' or '.join(ENGINES)}",
        )
    if isinstance(endpoint, str):
        given["endpoint"] = endpoint = checked_endpoint(endpoint, http=given.get("http"))
    if given.get("anonymous") and (keys or "profile" in given):
        raise _conflict("anonymous", *keys, *(["profile"] if "profile" in given else []))
    if keys and "profile" in given:
        raise _conflict("profile", *keys)
    if scheme != "az" and keys and not {"access_key", "secret_key"} <= set(keys):
        raise UsageError(
            "access_key and secret_key go together",
            value=", ".join(keys),
            hint="pass both, or leave both to the environment",
        )
    if given.get("path_style") is False and _IPV4.search(str(endpoint or "")):
        raise UsageError(
            "path_style=false puts the bucket into the host name, and an address has no names",
            value=endpoint,
            hint="leave path_style out",
        )
    if scheme == "gs" and keys:
        raise UsageError(
            "gs takes no access keys",
            hint="set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
        )
    others = {name: value for name, value in options.items() if name not in OPTION_NAMES}
    return Settings(**given, others=others)  # type: ignore[arg-type]


def checked_endpoint(endpoint: str, *, http: object = None) -> str:
    """The URL of a server; UsageError where it is none, or `http` says otherwise."""
    if "://" not in endpoint:
        endpoint = f"{'http' if http else 'https'}://{endpoint}"
    # Anywhere, because a secret may hold a slash, which would end the part with the host.
    if "@" in endpoint:
        raise UsageError(
            "an endpoint must not hold credentials",
            hint="pass them as access_key and secret_key, or in the environment",
        )
    scheme = endpoint.partition("://")[0].lower()
    try:
        parts = urlsplit(endpoint)
        good = parts.hostname and parts.port != 0 and not _BLANK.search(endpoint)
    except ValueError:  # no port is a name, or so large; and what has brackets is closed
        good = False
    if not good or scheme not in ("http", "https"):
        raise UsageError(
            "an endpoint is a URL", value=endpoint, hint="write https://host or https://host:port"
        )
    if scheme == "http" and http is False:
        raise _conflict("http=false", f"endpoint={endpoint}")
    return endpoint.rstrip("/")


def _conflict(*names: str) -> UsageError:
    return UsageError(
        "these storage options exclude each other",
        value=", ".join(names),
        hint="pass one of them",
    )


def _text(name: str, value: object) -> object:
    if not isinstance(value, str):
        raise UsageError(f"the storage option {name} is text", value=type(value).__name__)
    return value


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise UsageError(f"the storage option {name} is true or false", value=value)


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf or isinstance(value, bool):
        raise UsageError(f"the storage option {name} is a number of seconds", value=value)
    return seconds


def _size(name: str, value: object, *, least: int) -> int:
    size = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        size = int(float(match[1]) * _UNITS.get(match[2].lower(), -1))
    if size < least:
        raise UsageError(
            f"the storage option {name} is a whole number of at least {least}",
            value=value,
            hint="sizes may have a unit: 16MiB",
        )
    return size


# All others are text.
_VALUES: dict[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("anonymous", "path_style", "http"), _flag),
    **dict.fromkeys(("timeout", "deadline"), _seconds),
    "part_size": partial(_size, least=SMALLEST_PART),
    **dict.fromkeys(("concurrency", "request_bytes"), partial(_size, least=1)),
    "gap_bytes": partial(_size, least=0),
}
