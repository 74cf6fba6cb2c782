"""The folder of a foreign checkpoint, as its reader sees it; and documents in it, JSON and YAML."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CorruptionError, FormatError
from ckptkit.storage import Store, Stored

CONFIG = "config.json"
_MOST_CONFIG = 1 << 24
# Metadata is read whole, so it is bounded: no checkpoint that exists has a tenth of that.
MOST_BYTES = 1 << 30
# So much at a time of what lies near each other, and so many requests at a time to a server.
_RUN_BYTES = 8 << 20
# Between two of thousands more than that is not read along: it would be all of the tensors.
_MOST_GAP = 16 << 10
_AT_ONCE = 16
_YAML_DEPTH = 64
_YAML_WORDS = {"null": None, "true": True, "false": False}

_PART = re.compile(
    r"[^/]*\.(pt|pth|bin|ckpt|safetensors)|(optimizer|scheduler|rng_state|random_states)[^/]*|trainer_state\.json"
)

# What accelerate, and with it the Trainer of transformers, has DCP write: a folder for the model,
# one for the optimizer.
APART = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
DCP_METADATA = ".metadata"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where some bytes are: in a file, or in metadata that was read."""

    file: str
    offset: int
    length: int
    inside: bytes | None = None


class Folder:
    """Files of a store by key, and reads of their metadata."""

    def __init__(
        self,
        store: Store,
        files: Mapping[str, Stored],
        only: str | None = None,
        names: Iterable[str] = (),
    ) -> None:
        """With `only` the checkpoint is that one file. `names` are those directly in the folder,
        also of empty folders.
        """
        self.store = store
        self.files = files
        self.only = only
        self.apart = sorted(name for name in names if APART.fullmatch(name))
        self.seen: Any = hashlib.sha256()
        """The digest of all metadata that was read."""

    def where(self, key: str) -> str:
        """A file's place, for messages: of what metadata calls a file, which may be no name."""
        return f"{self.store.location}/{key}"

    def size(self, key: str) -> int:
        """The bytes of a file; FormatError where it is missing."""
        if key not in self.files:
            raise FormatError(
                "a file of the checkpoint is missing",
                where=self.where(key),
                hint="it was not copied along; copy the folder again",
            )
        return self.files[key].size

    def unread(self, used: Collection[str]) -> dict[str, str]:
        """What looks like parts of the checkpoint beside the files that are used, and why it is
        left out; nothing of one file, which is itself whatever lies beside it.
        """
        if self.only is not None:
            return {}
        left = sorted(self.files.keys() - set(used))
        found = {key: "a file that is not read" for key in left if _PART.fullmatch(key)}
        tops = {key.partition("/")[0] for key in used}
        for name in (name for name in self.apart if name not in tops):
            found[name] = "a checkpoint of its own that is not read: name its folder"
            if f"{name}/{DCP_METADATA}" not in self.files:
                found[name] = f"it has no {DCP_METADATA}: not written whole, or not copied whole"
        return found

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Some metadata of a file, which is neither cut short nor larger than metadata is."""
        size = self.size(key)
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise FormatError(
                f"the file has {size} bytes, its metadata needs those to {start + length}",
                where=self.where(key),
                hint="it was cut short; copy it again",
            )
        if length > MOST_BYTES:
            raise FormatError(
                f"metadata of more than {MOST_BYTES} bytes", where=self.where(key), value=length
            )
        data = self.store.read(key, start, length)
        self.seen.update(data)
        return data

    def read_many(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Small ranges of metadata, as (start, length) in the order of their starts: those near
        each other are read together. What would be behind the end of the file is left out.
        """
        size, can = self.size(key), self.store.abilities
        gap = min(can.gap_bytes, _MOST_GAP)
        runs: list[tuple[int, int]] = []
        for start, length in ranges:
            begin, end = min(start, size), min(start + length, size)
            is_near = runs and begin - runs[-1][1] <= gap
            # One within the last run has no run of its own, however long that is.
            if is_near and end - runs[-1][0] <= max(_RUN_BYTES, runs[-1][1] - runs[-1][0]):
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            else:
                runs.append((begin, end))
        with self.store.open(key, size) as source:

            def fetch(run: tuple[int, int]) -> bytes:
                return bytes(source.fetch(run[0], run[1] - run[0]))

            if can.waits_for_answers:
                with ThreadPoolExecutor(can.concurrency or _AT_ONCE) as pool:
                    read = list(pool.map(fetch, runs))
            else:
                read = [fetch(run) for run in runs]
        found: list[bytes] = []
        place = 0
        for start, length in ranges:
            while place + 1 < len(runs) and start >= runs[place + 1][0]:
                place += 1
            begin = start - runs[place][0]
            found.append(read[place][max(0, begin) : max(0, begin + length)])
        for data in read:
            self.seen.update(data)
        return found


def read_places(folder: Folder, places: Sequence[Place]) -> list[bytes]:
    """Some metadata, with few requests of each file."""
    found: list[bytes] = [place.inside or b"" for place in places]
    by_file: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        if place.inside is None:
            by_file.setdefault(place.file, []).append(number)
    for file, numbers in sorted(by_file.items()):
        numbers.sort(key=lambda number: places[number].offset)
        ranges = [(places[number].offset, places[number].length) for number in numbers]
        for number, data in zip(numbers, folder.read_many(file, ranges), strict=True):
            if len(data) < places[number].length:
                raise CorruptionError(
                    f"the file has {folder.size(file)} bytes, and more are needed",
                    where=folder.where(file),
                    value=(places[number].offset, places[number].length),
                    hint="it was cut short; copy it again",
                )
            found[number] = data
    return found


def config_of(folder: Folder) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder; nothing where there is none."""
    if CONFIG not in folder.files or folder.size(CONFIG) > _MOST_CONFIG:
        return {}
    found = parsed(folder.read(CONFIG), folder.where(CONFIG))
    return found if isinstance(found, dict) else {}


def parsed(data: bytes, where: str) -> Any:
    """JSON of somebody else's, of which every key is there once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise FormatError("a key is there twice", where=where)
        return found

    try:
        return json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "not valid JSON",
            where=where,
            value=str(error),
            hint="it was cut short or changed; copy it again",
        ) from error


def read_yaml(data: bytes, where: str) -> Any:
    """YAML of somebody else's: maps, lists and plain values; FormatError where it is none, or has
    what is not read here.

    It is read event by event. The loader in C ends the process at a deep value, and with aliases a
    short document would stand for one that never ends.
    """
    import yaml  # noqa: PLC0415 — nearly all folders have none

    try:
        return _yaml_value(yaml, data)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise FormatError(
            "neither valid JSON nor valid YAML",
            where=where,
            value=str(error)[:200],
            hint="it was cut short or changed; copy it again",
        ) from error


def _yaml_value(yaml: Any, data: bytes) -> Any:
    values: list[Any] = []
    above: list[list[Any]] = []
    for event in yaml.parse(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent) and event.implicit:
            above.append(values)
            values = []
            if len(above) > _YAML_DEPTH:
                raise ValueError(f"more than {_YAML_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            made: Any = values
            if isinstance(event, yaml.MappingEndEvent):
                made = dict(zip(values[::2], values[1::2], strict=True))
                if len(made) < len(values) // 2:
                    raise ValueError("a key is there twice")
            values = above.pop()
            values.append(made)
        elif isinstance(event, yaml.ScalarEvent) and any(event.implicit):
            text: Any = event.value
            if event.implicit[0]:  # without quotes
                is_number = re.fullmatch(r"-?\d{1,18}", text)
                text = int(text) if is_number else _YAML_WORDS.get(text, text)
            values.append(text)
        elif isinstance(event, yaml.NodeEvent):
            raise ValueError("an alias, or a value of a type of its own")
    return values[0] if values else None
