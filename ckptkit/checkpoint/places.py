"""Where the files of a run are, the only place that spells their names (FORMAT section 1); and from
a location to a committed step: the step itself, or the newest one of a run.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import index
from typing import NamedTuple, SupportsIndex, TypeAlias

from isal import isal_zlib

from ckptkit.checkpoint.workers import ask_all, uncollected
from ckptkit.errors import (
    CkptkitError,
    FormatError,
    NoSpaceError,
    NotCommittedError,
    NotFoundError,
    UsageError,
)
from ckptkit.foreign.readers import format_of
from ckptkit.format.encoding import (
    CRC_BYTES,
    CRC_MARK,
    MAX_DOCUMENT_BYTES,
    check_head,
    check_sum,
)
from ckptkit.format.manifest import MANIFEST_KIND, Manifest, SaveInfo, is_pack
from ckptkit.storage import (
    NO_OPTIONS,
    Address,
    Location,
    Options,
    Source,
    Store,
    default_pool,
    open_store,
)
from ckptkit.storage.base.store import checked_size

MANIFEST = "manifest.msgpack"
DATA = "data"
MAX_STEP = (1 << 63) - 1

Place: TypeAlias = str | os.PathLike[str] | Location | Address | Store

_STEP = re.compile(r"step-([0-9]{10,19})")
_MEANT = re.compile(r"(?:step[-_]?)?([0-9]{1,19})", re.ASCII)  # how people write it
# Larger manifests, of more than two million chunks, are looked at before they are read.
_AT_ONCE = 64 << 20
_BAND = 4 << 20
_HEAD_BYTES = 4096
# Of a folder `data`, which may be anybody's, no more are looked into.
_SOME_SAVES = 16


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
    if source_options is None:
        source_options = None if isinstance(source, Store) else options
    if isinstance(destination, Store):
        options = None
    return store_at(source, source_options), store_at(destination, options)


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


class StepFolder(NamedTuple):
    """The folder of a step: the one of this name in a store, or without a name the store itself."""

    store: Store
    name: str = ""

    def key(self, name: str) -> str:
        """What the store calls something in it."""
        return f"{self.name}/{name}" if self.name else name

    def data(self, save_id: str = "") -> str:
        """The folder of one save's packs, or of those of all saves."""
        return self.key(f"{DATA}/{save_id}" if save_id else DATA)

    def pack(self, save_id: str, name: str) -> str:
        """A pack of a save."""
        return f"{self.data(save_id)}/{name}"

    def where(self, name: str) -> str:
        """Where something in it is, for messages."""
        return described(self.store, self.key(name))

    def __str__(self) -> str:
        return described(self.store, self.name)


def described(store: Store, key: str) -> str:
    """A key as users know it, for messages."""
    return str(store.location / key) if key else str(store.location)


def new_save_id() -> str:
    """Never used before; sorts by time, so that a listing tells a story."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{os.urandom(6).hex()}"


def read_manifest(folder: StepFolder) -> Manifest:
    """The manifest of a step; NotCommittedError or NotFoundError where there is none."""
    return decoded_manifest(folder, _stored(folder))


def _stored(folder: StepFolder, most: int = MAX_DOCUMENT_BYTES, *, checked: bool = False) -> bytes:
    data = manifest_bytes(folder, most, checked=checked)
    if not data:
        names = folder.store.children(folder.name)
        raise _not_committed(folder, names, is_empty=data is not None)
    return data


def manifest_bytes(
    folder: StepFolder, most: int = MAX_DOCUMENT_BYTES, *, checked: bool = False
) -> bytes | None:
    """The manifest as it is stored, or its beginning where it has more than `most` bytes, in one
    request; None where there is none, and nothing in one that was only begun.

    Before a large one is in memory its ends are looked at: a file with a hole of 4 GiB costs
    nothing to make. In a file system its checksum is compared first too; over a network, where that
    is a second read of all of it, where `checked` asks for it.
    """
    store, key = folder.store, folder.key(MANIFEST)
    try:
        return store.read_whole(key, _AT_ONCE)
    except NotFoundError:
        return None
    except FormatError:
        where = described(store, key)
        with store.open(key) as source:
            checked_size(where, source.size, MAX_DOCUMENT_BYTES)
            check_head(MANIFEST_KIND, bytes(source.fetch(0, _HEAD_BYTES)), where)
            tail = bytes(source.fetch(source.size - CRC_BYTES, CRC_BYTES))
            crc = int.from_bytes(tail[-4:], "big")
            is_near = not store.abilities.waits_for_answers
            if (checked or is_near) and tail[0] == CRC_MARK:
                crc = crc_of(source, 0, source.size - 4)
            check_sum(MANIFEST_KIND, tail, crc, where)
        with _in_memory(where, source.size):
            return store.read(key, 0, min(source.size, most))


def read_head(folder: StepFolder, *, checked: bool = False) -> tuple[SaveInfo, int]:
    """What a listing shows of a step: the save without its details, and the bytes of its packs;
    NotCommittedError or NotFoundError where there is no manifest. With `checked` the checksum of a
    large manifest is compared over a network too.
    """
    data, where = _stored(folder, _AT_ONCE, checked=checked), folder.where(MANIFEST)
    if len(data) < _AT_ONCE:
        check_sum(MANIFEST_KIND, data[-CRC_BYTES:], isal_zlib.crc32(memoryview(data)[:-4]), where)
    save, nbytes = Manifest.head(data, where)
    _check_number(folder, save)
    return save, nbytes


@contextmanager
def _in_memory(where: str, size: int) -> Iterator[None]:
    """A manifest may have 4 GiB, and as objects a part of it takes up to 70 times its bytes."""
    try:
        yield
    except MemoryError as error:
        raise FormatError(
            f"a manifest of {size} bytes takes more memory than there is",
            where=where,
            hint="`ckpt ls RUN` reads no more than its head",
        ) from error


def crc_of(source: Source, start: int, size: int) -> int:
    """The checksum of bytes that may be too many to be in memory at once."""
    crc = 0
    with default_pool().take(_BAND) as memory:
        for begin in range(0, size, _BAND):
            with memory[: min(_BAND, size - begin)] as band:
                source.read_into(start + begin, band)
                crc = int(isal_zlib.crc32(band, crc))
    return crc


def decoded_manifest(folder: StepFolder, data: bytes) -> Manifest:
    """The manifest of a step that is stored as these bytes."""
    where = folder.where(MANIFEST)
    with _in_memory(where, len(data)), uncollected():
        manifest = Manifest.from_bytes(data, where)
    _check_number(folder, manifest.save)
    return manifest


def _check_number(folder: StepFolder, save: SaveInfo) -> None:
    number = step_number(folder.name or folder.store.location.name)
    if number is not None and number != save.step:
        raise FormatError(
            f"the manifest is of step {save.step}, the folder of step {number}",
            where=folder.where(MANIFEST),
            hint="the folder was renamed; give it its own name again",
        )


def manifest_at(store: Store) -> tuple[StepFolder, Manifest]:
    """The manifest of the step at the location of a store, or of the newest one of the run there,
    and the step's folder.
    """
    folder, data = stored_manifest(store)
    return folder, decoded_manifest(folder, data)


def stored_manifest(store: Store, step: int | None = None) -> tuple[StepFolder, bytes]:
    """A step's folder, and its manifest as it is stored: of the step here or the newest of the run
    here, or of the `step` of that. One request for a step that has its own name or is said, two
    for the newest of a run.
    """
    here = StepFolder(store)
    if step is not None:
        named = StepFolder(store, step_name(step))
        return named, _stored(named)
    # By its name before anything is listed: what is named as a step may still be a run.
    if step_number(store.location.name) is not None and (data := manifest_bytes(here)):
        return here, data
    names = store.children("")
    if holds_step(here, names):
        return here, _stored(here)
    for _, name in sorted(_numbered(names).items(), reverse=True):
        if data := manifest_bytes(folder := StepFolder(store, name)):
            return folder, data
    raise _not_committed(here, names)


def holds_step(folder: StepFolder, names: Collection[str]) -> bool:
    """Whether a folder with these names is that of a step, or of one that was begun. Others have a
    folder `data`, too: ours has folders of saves in it, with packs, or nothing yet.
    """
    if MANIFEST in names or DATA not in names or _numbered(names):
        return MANIFEST in names
    # With nothing in it, it says nothing: then the folder's own name does.
    is_own = len(names) == 1 or step_number(folder.name or folder.store.location.name) is not None
    store, saves = folder.store, folder.store.children(folder.data())
    for save_id in saves[:_SOME_SAVES]:
        inside = store.children(folder.data(save_id))
        if any(map(is_pack, inside)) or (
            is_own and not inside and stored_size(store, folder.data(save_id)) is None
        ):
            return True
    return is_own and not saves


def refuse_step(store: Store) -> None:
    """Raise UsageError where the place of a run is a committed step."""
    if manifest_size(StepFolder(store)):
        raise UsageError(
            "a step, where a run is wanted",
            where=str(store.location),
            hint="a run is the folder that its steps are in; ckptkit.live.load takes a step too",
        )


def refuse_inside_step(store: Store) -> None:
    """Raise UsageError where a place lies in the folder of a step, which is deleted as a whole."""
    place, above = store.location, store.location.parent
    while above != place:
        # By the name first, as each look may be a request.
        if step_number(above.name) is not None:
            step = open_store(replace(store.address, location=above))
            if manifest_size(StepFolder(step)):
                raise UsageError(
                    "the place lies in the folder of a step, and would be deleted with it",
                    where=str(store.location),
                    hint="name a place beside the run",
                )
        place, above = above, above.parent


def step_folders(store: Store) -> dict[int, str]:
    """The folders of all steps of a run by number, committed or not."""
    return _numbered(store.children(""))


def _numbered(names: Iterable[str]) -> dict[int, str]:
    found = {step_number(name): name for name in names}
    return {number: found[number] for number in sorted(n for n in found if n is not None)}


def committed_steps(store: Store) -> dict[int, str]:
    """The folders of the committed steps of a run by number.

    An empty manifest commits nothing: where a file system has no links it is what remains of a
    commit that was killed (`Store.put`).
    """
    folders = step_folders(store)
    sizes = ask_all(store, lambda name: manifest_size(StepFolder(store, name)), folders.values())
    return {
        number: name for (number, name), size in zip(folders.items(), sizes, strict=True) if size
    }


def newest_first(steps: Iterable[int], step: int | None = None) -> list[int]:
    """From the newest of some steps on; or the `step` asked for, and then those before it. That one
    is tried whether it is there or not: that it lacks has to be said.
    """
    found = sorted(steps, reverse=True)
    return found if step is None else [step, *(each for each in found if each < step)]


def steps_to_keep(steps: Iterable[SupportsIndex]) -> frozenset[int]:
    """Numbers of steps as ints, also those in tensors. A text is refused: it equals no step, so the
    one that it means would be deleted.
    """
    try:
        return frozenset(map(index, steps))
    except TypeError as error:
        hint = "pass a list of the numbers of steps, as ints"
        raise UsageError("not steps to keep", value=steps, hint=hint) from error


def manifest_size(folder: StepFolder) -> int | None:
    """The bytes of a step's manifest: none at all where a commit was cut off, None without one."""
    return stored_size(folder.store, folder.key(MANIFEST))


def stored_size(store: Store, key: str) -> int | None:
    """The bytes of an object; None where there is none."""
    try:
        return store.size(key)
    except NotFoundError:
        return None


def check_room(store: Store, needed: int, where: Location) -> None:
    """Raise NoSpaceError, before anything is written, where there is not enough room."""
    room = store.room()
    if room is not None and needed > room:
        raise NoSpaceError(
            f"{needed} bytes are to be written, {room} are free",
            where=str(where),
            hint="nothing was written; `ckpt prune` frees what runs do not need",
        )


def _not_committed(
    folder: StepFolder, names: Sequence[str], *, is_empty: bool = False
) -> NotFoundError:
    store, where = folder.store, str(folder)
    if is_empty or holds_step(folder, names):
        objects = len(store.list(folder.data()))
        manifest = "an empty manifest" if is_empty else "no manifest"
        return NotCommittedError(
            f"not a committed checkpoint: {objects} objects, {manifest}",
            where=where,
            hint="`ckpt ls RUN` lists the steps that are; "
            "`ckpt rebuild STEP` makes a lost manifest again",
        )
    steps = [name for name in names if step_number(name) is not None]
    if steps:
        return NotFoundError(
            f"a run without a committed step: {len(steps)} were begun",
            where=where,
            hint="`ckpt ls RUN` shows them",
        )
    if not names and store.location.name == MANIFEST:
        return NotFoundError(
            "no checkpoint of ckptkit, but the manifest of a step",
            where=where,
            hint="pass the folder that it is in",
        )
    if known := format_of(store, names):
        return NotFoundError(
            f"no checkpoint of ckptkit, but {known.what}",
            where=where,
            hint=_FOREIGN_HINT if not known.reader else READABLE_HINT,
        )
    what = f"{len(names)} other files" if names else "nothing there"
    guess = "" if names else _steps_beside(folder)
    return NotFoundError(
        f"no checkpoint: {what}", where=where, hint=f"{guess}pass the folder of a run or of a step"
    )


def _steps_beside(folder: StepFolder) -> str:
    """What a hint begins with where a run lacks a step: those of the nearest numbers."""
    store = folder.store
    meant = _MEANT.fullmatch(folder.name or store.location.name)
    if meant is None:
        return ""
    wanted = int(meant[1])
    with suppress(CkptkitError):
        place = replace(store.address, location=store.location.parent)
        steps = step_folders(store if folder.name else store_at(place))
        most = 1 if wanted in steps else 2
        close = sorted(steps, key=lambda step: abs(step - wanted))[:most]
        if close:
            return f"did you mean {' or '.join(steps[step] for step in sorted(close))}? "
    return ""


_FOREIGN_HINT = (
    "this version cannot read it: load it with what wrote it, and save that with ckptkit.live.save"
    " or ckptkit.Writer; of a pack pass the folder of the step"
)
READABLE_HINT = (
    "`ckpt show`, `diff`, `verify`, `reshard` and `ckptkit.open` read it as it is; "
    "`ckpt import` makes a step of it, with which everything works"
)
