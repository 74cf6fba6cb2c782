"""Where the files of a run are: the only place that spells their names (FORMAT section 1)."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from typing import TypeAlias

from ckptkit.errors import UsageError
from ckptkit.storage import NO_OPTIONS, Address, Location, Options, Store, open_store

MANIFEST = "manifest.msgpack"
DATA = "data"
MAX_STEP = (1 << 63) - 1

Place: TypeAlias = str | os.PathLike[str] | Location | Address | Store

_STEP = re.compile(r"step-([0-9]{10,19})")


def store_at(place: Place, options: Options | None = None) -> Store:
    """The store of a path or a URL, reached with these options, or the store itself."""
    if not isinstance(place, Store):
        return open_store(place, options or NO_OPTIONS)
    if options:
        raise UsageError(
            "this store is open already, with options of its own",
            where=str(place.location),
            hint="pass its location, or leave storage_options out",
        )
    return place


def stores_at(
    source: Place, destination: Place, options: Options | None, source_options: Options | None
) -> tuple[Store, Store]:
    """The stores of two places: the same options reach both, unless the source has its own; a
    store that is open already needs none.
    """
    own = options if source_options is None else source_options
    is_shared = source_options is None
    return (
        store_at(source, None if is_shared and isinstance(source, Store) else own),
        store_at(destination, None if isinstance(destination, Store) else options),
    )


def step_name(step: int) -> str:
    """The folder of a step."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UsageError(
            "a step is an integer from 0 to 2**63 - 1",
            value=step,
            hint="pass the number of the training step as an int",
        )
    return f"step-{step:010d}"


def step_number(name: str) -> int | None:
    """The step of a folder, or None for any other name."""
    match = _STEP.fullmatch(name)
    if not match:
        return None
    number = int(match.group(1))
    return number if number <= MAX_STEP and step_name(number) == name else None


def under(prefix: str, name: str) -> str:
    """A key below a prefix, which may be empty."""
    return f"{prefix}/{name}" if prefix else name


def data_prefix(prefix: str, save_id: str) -> str:
    """The folder of one save's packs."""
    return under(prefix, f"{DATA}/{save_id}")


def described(store: Store, key: str) -> str:
    """A key as users know it, for messages."""
    return str(store.location / key) if key else str(store.location)


def new_save_id() -> str:
    """Never used before; sorts by time, so that a listing tells a story."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(6)}"
