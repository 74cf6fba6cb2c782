"""Making a lost manifest again, from nothing but the packs."""

from __future__ import annotations

from ckptkit.checkpoint.locate import read_manifest
from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    Place,
    described,
    step_name,
    step_number,
    store_at,
    under,
)
from ckptkit.checkpoint.write.commit import gather, publish
from ckptkit.errors import (
    CkptkitError,
    FormatError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    StepExistsError,
    UsageError,
    VersionError,
)
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Options, Store

_NAMED = 8


def rebuild(
    location: Place, *, save_id: str | None = None, storage_options: Options | None = None
) -> Manifest:
    """Make the manifest of a step from its packs and commit it; refused where a readable one
    exists.

    A damaged or empty one is replaced.

    With the packs of several complete saves in the step, `save_id` has to say which one is
    meant.
    """
    store, prefix = store_at(location, storage_options), ""
    number = step_number(store.location.name)
    if number is not None and store.location.scheme == "file" and not isinstance(location, Store):
        # From the run down: where the step is a link, what it leads to is not this run's.
        store, prefix = store_at(store.location.parent), store.location.name
    damaged = _check_manifest(store, prefix)
    manifest = _choose(store, prefix, save_id)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the packs are of step {manifest.save.step}, the folder is that of step {number}",
            where=described(store, prefix),
            hint=f"the folder was renamed: call it {step_name(manifest.save.step)} again",
        )
    publish(store, prefix, manifest, replace=damaged)
    return manifest


def _check_manifest(store: Store, prefix: str) -> bool:
    """Whether there is a manifest that is damaged or empty; StepExistsError where there is a
    good one.
    """
    if MANIFEST not in store.children(prefix):
        return False
    try:
        read_manifest(store, prefix)
    except VersionError:
        raise
    except (FormatError, NotCommittedError):
        return True
    where = described(store, prefix)
    raise StepExistsError(
        "the step is committed already, and its manifest can be read",
        where=where,
        hint=f"there is nothing to rebuild; `ckpt verify {where}` looks at every byte",
    )


def _choose(store: Store, prefix: str, save_id: str | None) -> Manifest:
    where = described(store, under(prefix, DATA))
    found = store.children(under(prefix, DATA))
    if not found:
        raise NotFoundError(
            "no packs to rebuild from",
            where=where,
            hint="pass the folder of a step; `ckpt ls RUN` lists those of a run",
        )
    if save_id is not None and save_id not in found:
        raise NotFoundError(
            "no such save",
            where=where,
            value=save_id,
            hint=f"there is {', '.join(found[-_NAMED:])}",
        )
    whole: dict[str, Manifest] = {}
    problems = []
    for candidate in [save_id] if save_id else found:
        try:
            whole[candidate] = gather(store, prefix, candidate)
        except (FormatError, PeerError, NotFoundError) as error:
            problems.append(f"{candidate}: {_told(error)}")
    if not whole:
        raise FormatError(
            f"no save in it is complete: {'; '.join(problems)}",
            where=where,
            hint="the step was never finished, or a pack is damaged; use an older step",
        )
    if len(whole) > 1:
        raise UsageError(
            f"{len(whole)} complete saves: {', '.join(whole)}",
            where=where,
            hint="say which one with save_id (`ckpt rebuild STEP --save-id …`)",
        )
    return next(iter(whole.values()))


def _told(error: CkptkitError) -> str:
    return f"{error.where}: {error.what}" if error.where else error.what
