"""Digests of a state that do not depend on how it is sharded (FORMAT section 11)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.checkpoint.check.verify import Finding
from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import (
    STREAM_MEMORY,
    Band,
    Limits,
    Readable,
    stored_arrays,
    stream,
)
from ckptkit.checkpoint.workers import Progress
from ckptkit.format.leaves import canonical
from ckptkit.format.names import ALIKE, DIGEST_ALGORITHM
from ckptkit.format.objects import ObjectInfo, whole
from ckptkit.model.document import parse_size
from ckptkit.storage import Options

_ARRAY, _OBJECT, _STEP = b"ckptkit-array-1\0", b"ckptkit-object-1\0", b"ckptkit-step-1\0"


@dataclass(frozen=True, slots=True)
class Digest:
    """What a state is, whatever its strategy: equal digests, equal states."""

    step: str
    """Of all arrays and objects together."""
    arrays: dict[str, str]
    """By name; tied arrays are there under each of their names."""
    objects: dict[str, str]

    @property
    def algorithm(self) -> str:
        """The hash that all of them are made with."""
        return DIGEST_ALGORITHM

    def findings(self, checkpoint: Checkpoint) -> list[Finding]:
        """What is wrong if this is the digest of a step: it may have another one on record."""
        recorded = checkpoint.details.get("digest")
        if not isinstance(recorded, dict) or recorded.get("algorithm") != DIGEST_ALGORITHM:
            return []
        if recorded.get("step") == self.step:
            return []
        what = f"the state has the digest {self.step}, recorded is {recorded.get('step')!s:.40}"
        return [Finding("mismatch", checkpoint.location, what)]


def digest(
    location: Place,
    *,
    memory: int | str = STREAM_MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> Digest:
    """The digest of a step (of a run: its newest one), every chunk of which is checked."""
    store = store_at(location, storage_options)
    limits = Limits.of(parse_size(memory), threads, stores=[store])
    with open_checkpoint(store) as checkpoint:
        stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(store))
        return digest_of(stored, checkpoint.manifest.objects, limits, progress=progress)


def digest_of(
    arrays: Mapping[str, Readable],
    objects: Sequence[ObjectInfo],
    limits: Limits,
    *,
    progress: Progress | None = None,
) -> Digest:
    """The digest of arrays by name, where two names may have one array, and of objects as a
    manifest has them.
    """
    distinct = list({id(array): array for array in arrays.values()}.values())
    hashers = [xxhash.xxh3_128(_heading(array)) for array in distinct]

    def add(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        hashers[band.item].update(values[0].reshape(-1).view(np.uint8).data)

    stream([[array] for array in distinct], add, limits, ordered=True, progress=progress)
    texts = {id(array): hasher.hexdigest() for array, hasher in zip(distinct, hashers, strict=True)}
    of_arrays = {name: texts[id(arrays[name])] for name in sorted(arrays)}
    of_objects = {item.name: object_digest(item) for item in state_objects(objects, of_arrays)}
    return Digest(_step_digest(of_arrays, of_objects), of_arrays, of_objects)


def state_objects(objects: Sequence[ObjectInfo], arrays: Iterable[str]) -> list[ObjectInfo]:
    """The objects, sorted by name, that are part of the state, and not said of an array that is."""
    said = {f"{ALIKE}/{name}" for name in arrays}
    return sorted((o for o in objects if o.name not in said), key=lambda item: item.name)


def object_digest(item: ObjectInfo) -> str:
    """The digest of one object of a manifest."""
    hasher = xxhash.xxh3_128(_OBJECT + item.semantics.encode() + b"\0")
    hasher.update(canonical(whole(item), item.name))
    return hasher.hexdigest()


def _heading(array: Readable) -> bytes:
    numbers = (len(array.shape), *array.shape)
    return _ARRAY + array.dtype.name.encode() + b"\0" + struct.pack(f"<{len(numbers)}Q", *numbers)


def _step_digest(arrays: Mapping[str, str], objects: Mapping[str, str]) -> str:
    hasher = xxhash.xxh3_128(_STEP)
    for kind, digests in ((b"a", arrays), (b"o", objects)):
        for name in sorted(digests):
            text = name.encode()
            hasher.update(kind + bytes.fromhex(digests[name]) + struct.pack("<Q", len(text)) + text)
    return hasher.hexdigest()
