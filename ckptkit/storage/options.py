"""How to reach a store, and with which credentials: what nobody may print."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import SplitResult, urlsplit
from ckptkit.errors import UsageError
from ckptkit.storage.location import BUCKETS

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptkit.errors import UsageError
from ckptkit.storage.location import Location

Options = Mapping[str, object]
NO_OPTIONS: Options = MappingProxyType({})

OPTION_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "engine": "obstore or fsspec",
        "endpoint": "the URL of the server",
        "region": "the region of the bucket",
        "profile": "a profile of ~/.aws",
        "anonymous": "true: ask without credentials",
        "path_style": "true: the bucket is in the path, false: in the host name",
        "http": "true: without encryption",
        "access_key": "the public half of a key",
        "secret_key": "the secret half of a key",
        "session_token": "what comes with a temporary key",
        "timeout": "seconds until a request is answered, or goes on being answered",
        "deadline": "seconds for one operation with its retries",
        "part_size": "bytes per part of an upload",
        "concurrency": "how many requests at a time",
        "request_bytes": "bytes per read",
        "gap_bytes": "bytes that are read rather than asked around",
    }
)
"""The options that both engines understand, and what each is."""


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


def checked_names(options: Options) -> None:
    """UsageError for an option that there is not; what it was set to is not shown."""
    if unknown := sorted(str(name) for name in options if name not in OPTION_NAMES):
        raise UsageError(
            "no such storage option" if len(unknown) == 1 else "no such storage options",
            value=", ".join(unknown),
            hint=f"there are {', '.join(OPTION_NAMES)}",
        )

ENGINES = ("obstore", "fsspec")
ENGINE_VARIABLE = "CKPTKIT_STORAGE_ENGINE"
# Every server of the S3 kind refuses parts that are smaller, unless they are the last.
SMALLEST_PART = 5 << 20

# Bytes per second: an upload that is slower than this fails.
LEAST_RATE = 1e6
# Of a line that is slow, and not of a connection that is broken.
READ_RATE = 4e6

_CONNECT_SECONDS = 5.0
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9} | {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
_BLANK = re.compile(r"[^!-~]")
_IPV4 = re.compile(r"//[0-9.]+(?::[0-9]+)?(?:/|$)")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a store is reached; None leaves it to the environment and the engine."""

    engine: str | None = None
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    path_style: bool | None = None
    http: bool = False
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    deadline: float = 300.0
    part_size: int = 16 << 20
    concurrency: int = 16
    request_bytes: int = 16 << 20
    gap_bytes: int = 256 << 10
    others: Options = field(default_factory=lambda: MappingProxyType({}), repr=False, hash=False)
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


def read_settings(
    scheme: str, options: Options, environment: Mapping[str, str] = os.environ
) -> Settings:
    """The settings for one kind of store; all values may be text, as a command line gives them."""
    if scheme in BUCKETS:
        checked_names(options)
    given = {name: options[name] for name in OPTION_NAMES if options.get(name) is not None}
    settings = Settings(
        engine=_engine(scheme, given, environment),
        endpoint=_endpoint(scheme, given, environment),
        region=_text(given, "region") or _region(scheme, environment),
        profile=_text(given, "profile"),
        anonymous=_flag(given, "anonymous") or False,
        path_style=_flag(given, "path_style"),
        http=_flag(given, "http") or False,
        access_key=_text(given, "access_key"),
        secret_key=_text(given, "secret_key"),
        session_token=_text(given, "session_token"),
        timeout=_seconds(given, "timeout", 60.0),
        deadline=_seconds(given, "deadline", 300.0),
        part_size=_size(given, "part_size", 16 << 20, least=SMALLEST_PART),
        concurrency=_size(given, "concurrency", 16, least=1),
        request_bytes=_size(given, "request_bytes", 16 << 20, least=1),
        gap_bytes=_size(given, "gap_bytes", 256 << 10, least=0),
        others={name: value for name, value in options.items() if name not in OPTION_NAMES},
    )
    _refuse_conflicts(scheme, given, settings)
    return settings


def _refuse_conflicts(scheme: str, given: Options, settings: Settings) -> None:
    keys = [name for name in ("access_key", "secret_key", "session_token") if name in given]
    for name in keys:
        if not given[name]:
            raise UsageError(
                f"the storage option {name} is empty",
                hint="leave it out to take the credentials of the environment",
            )
    if settings.anonymous and (keys or "profile" in given):
        raise _conflict("anonymous", *keys, *(["profile"] if "profile" in given else []))
    if keys and "profile" in given:
        raise _conflict("profile", *keys)
    if scheme != "az" and keys and not {"access_key", "secret_key"} <= set(keys):
        raise UsageError(
            "access_key and secret_key go together",
            value=", ".join(keys),
            hint="pass both, or leave both to the environment",
        )
    if settings.path_style is False and _IPV4.search(settings.endpoint or ""):
        raise UsageError(
            "path_style=false puts the bucket into the host name, and an address has no names",
            value=settings.endpoint,
            hint="leave path_style out",
        )
    if scheme == "gs" and keys:
        raise UsageError(
            "gs takes no access keys",
            hint="set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
        )


def _conflict(*names: str) -> UsageError:
    return UsageError(
        "these storage options exclude each other",
        value=", ".join(names),
        hint="pass one of them",
    )


def _engine(scheme: str, given: Options, environment: Mapping[str, str]) -> str | None:
    wished = environment.get(ENGINE_VARIABLE) if scheme in BUCKETS else None
    engine = _text(given, "engine") or wished or None
    if engine is not None and engine not in ENGINES:
        raise UsageError(
            "no such storage engine",
            value=engine,
            hint=f"the option engine and {ENGINE_VARIABLE} take {' or '.join(ENGINES)}",
        )
    return engine


def _endpoint(scheme: str, given: Options, environment: Mapping[str, str]) -> str | None:
    names = _ENDPOINTS if scheme == "s3" else ()
    found = next((environment[name] for name in names if environment.get(name)), None)
    endpoint = _text(given, "endpoint") or found
    if endpoint is None:
        return None
    return checked_endpoint(endpoint, http=_flag(given, "http"))


def checked_endpoint(endpoint: str, *, http: bool | None = None) -> str:
    """The URL of a server; UsageError where it is none, or `http` says otherwise."""
    if "://" not in endpoint:
        endpoint = f"{'http' if http else 'https'}://{endpoint}"
    # Anywhere, because a secret may hold a slash, which would end the part with the host.
    if "@" in endpoint:
        raise UsageError(
            "an endpoint must not hold credentials",
            hint="pass them as access_key and secret_key, or in the environment",
        )
    parts = urlsplit(endpoint)
    good = parts.hostname and _has_good_port(parts) and not _BLANK.search(endpoint)
    if parts.scheme not in ("http", "https") or not good:
        raise UsageError(
            "an endpoint is a URL", value=endpoint, hint="write https://host or https://host:port"
        )
    if parts.scheme == "http" and http is False:
        raise _conflict("http=false", f"endpoint={endpoint}")
    return endpoint.rstrip("/")


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _region(scheme: str, environment: Mapping[str, str]) -> str | None:
    if scheme != "s3":
        return None
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None


def _text(given: Options, name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"the storage option {name} is text", value=type(value).__name__)
    return value or None


def _flag(given: Options, name: str) -> bool | None:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise UsageError(f"the storage option {name} is true or false", value=value)


def _seconds(given: Options, name: str, default: float) -> float:
    value = given.get(name, default)
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf or isinstance(value, bool):
        raise UsageError(f"the storage option {name} is a number of seconds", value=value)
    return seconds


def _size(given: Options, name: str, default: int, *, least: int) -> int:
    value = given.get(name, default)
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
