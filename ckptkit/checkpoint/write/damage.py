"""Damaged steps that a load went past: which of them a save may replace, and which it never may.

A job that goes back comes to the number of the damaged step again. In the process that went back,
its save takes that step's place. With a local folder that save has still to be copied: a note
beside it tells a later process that just this save is to replace just that step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from ckptkit.checkpoint.places import MANIFEST, StepFolder, manifest_bytes, read_manifest
from ckptkit.errors import CkptkitError, CorruptionError, FormatError, VersionError
from ckptkit.format.encoding import MAX_DOCUMENT_BYTES
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Store

Damage: TypeAlias = tuple[StepFolder, bytes | None, Exception]
"""A step, the stamp that it had before it was read, and what was wrong with it."""

# Where each damaged step is that a save of this process may replace, and its stamp.
REPLACEABLE: dict[str, bytes] = {}
_REPLACING = "replacing.json"


def stamp(folder: StepFolder) -> bytes | None:
    """What tells a save from any other of the same step: the digest of its manifest; None where
    there is none that can be read from the store.
    """
    try:
        data = manifest_bytes(folder)
    except (CkptkitError, MemoryError):
        return None
    return hashlib.sha256(data).digest() if data else None


def mark_replaceable(damaged: Iterable[Damage], loaded: StepFolder) -> None:
    """A load found these steps damaged, and took another one instead. The job comes to their
    numbers again, and what this process saves then takes their place. Without that the job would
    end there, again after each start. What was `loaded` is not to be replaced, whatever an earlier
    load found.

    Only a step whose bytes are not what was written makes way, and only while it is that very one:
    not one that another version wrote, that was renamed, or that was saved anew since.
    """
    REPLACEABLE.pop(_place(loaded), None)
    for folder, before, error in damaged:
        # The load went well. A step that cannot be looked at now stays.
        with suppress(CkptkitError, MemoryError):
            is_damaged = isinstance(error, CorruptionError) or is_unreadable(folder)
            if is_damaged and before is not None and before == stamp(folder):
                REPLACEABLE[_place(folder)] = before


def is_replaceable(folder: StepFolder) -> bool:
    """Whether the step is still the damaged one that a load went past: a later save stays."""
    place = _place(folder) if REPLACEABLE else ""
    return place in REPLACEABLE and stamp(folder) == REPLACEABLE[place]


def note_replacing(local: StepFolder, remote: StepFolder) -> None:
    """What was saved in the local folder is to replace the damaged step of the run that a load went
    past. This job may end before it is copied: the next one knows it from here.
    """
    if is_replaceable(remote):
        pair = [REPLACEABLE[_place(remote)].hex(), read_manifest(local).save.save_id]
        local.store.put(_REPLACING, json.dumps(_noted(local.store) | {remote.name: pair}).encode())


def forget_replacing(local: StepFolder) -> None:
    """It is copied: what takes its place in the run later is not to be replaced."""
    told = _noted(local.store)
    if told.pop(local.name, None) is not None:
        # It is copied all the same.
        with suppress(CkptkitError):
            local.store.put(_REPLACING, json.dumps(told).encode())


def may_replace(remote: StepFolder, local: Store, save_id: str) -> bool:
    """Whether this save, which waits in the local folder, may replace the step of the run."""
    if is_replaceable(remote):
        return True
    before = stamp(remote)
    return before is not None and _noted(local).get(remote.name) == [before.hex(), save_id]


def _noted(local: Store) -> dict[str, Any]:
    # What cannot be read says nothing.
    with suppress(CkptkitError, ValueError, RecursionError):
        told = json.loads(local.read_whole(_REPLACING, MAX_DOCUMENT_BYTES))
        return told if isinstance(told, dict) else {}
    return {}


def is_unreadable(folder: StepFolder) -> bool:
    """Whether the step has a manifest that no version can read."""
    try:
        if data := manifest_bytes(folder):
            Manifest.from_bytes(data, folder.where(MANIFEST))
    except VersionError:
        return False
    except FormatError:
        return True
    return False


def _place(folder: StepFolder) -> str:
    """Where a step is, whatever links lead to its run."""
    location = folder.store.location
    at = os.path.realpath(location.path) if location.scheme == "file" else str(location)
    return f"{at}/{folder.name}" if folder.name else at
