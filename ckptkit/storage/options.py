"""How to reach a store, and with which credentials: what nobody may print."""

from __future__ import annotations

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
