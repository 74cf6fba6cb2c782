"""How to reach a store, and with which credentials: what nobody may print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptkit.storage.location import Location

Options = Mapping[str, object]
NO_OPTIONS: Options = MappingProxyType({})


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
