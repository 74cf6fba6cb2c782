"""From a location to a committed step: the step itself, or the newest one of a run."""

from __future__ import annotations

from ckptkit.checkpoint.places import DATA, MANIFEST, described, step_number, under
from ckptkit.errors import AlreadyExistsError, FormatError, NotCommittedError, NotFoundError
from ckptkit.format.envelope import MAX_DOCUMENT_BYTES
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Store


def read_manifest(store: Store, prefix: str) -> Manifest:
    """The manifest of a step; NotCommittedError or NotFoundError where there is none."""
    key = under(prefix, MANIFEST)
    try:
        data = store.read_whole(key, MAX_DOCUMENT_BYTES)
    except NotFoundError as error:
        raise _not_committed(store, prefix) from error
    if not data:
        raise _not_committed(store, prefix, is_begun=True)
    manifest = Manifest.from_bytes(data, described(store, key))
    number = step_number(prefix or store.location.name)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the manifest is of step {manifest.save.step}, the folder of step {number}",
            where=described(store, key),
            hint="the folder was renamed; give it its own name again",
        )
    return manifest


def manifest_at(store: Store) -> tuple[str, Manifest]:
    """(prefix in the store, manifest) of the step at its location, or of the newest one of the
    run there.
    """
    try:
        return "", read_manifest(store, "")
    except NotCommittedError:
        raise
    except NotFoundError:
        numbers = committed_steps(store)
        if not numbers:
            raise
    prefix = numbers[max(numbers)]
    return prefix, read_manifest(store, prefix)


def step_folders(store: Store) -> dict[int, str]:
    """The folders of all steps of a run by number, committed or not."""
    found = {step_number(name): name for name in store.children("")}
    return {number: found[number] for number in sorted(n for n in found if n is not None)}


def committed_steps(store: Store) -> dict[int, str]:
    """The folders of the committed steps of a run by number.

    An empty manifest commits nothing: where a file system has no links it is what remains of a
    commit that was killed (`Store.put`).
    """
    return {
        number: name for number, name in step_folders(store).items() if _manifest_size(store, name)
    }


def refuse_begun(store: Store, prefix: str) -> None:
    """Raise AlreadyExistsError where the manifest is empty: a commit was cut off, or is just
    about to fill it.
    """
    if _manifest_size(store, prefix) == 0:
        raise AlreadyExistsError(
            "a save of this step was killed while it committed: its manifest is empty",
            where=described(store, prefix),
            hint="once no save is under way, `ckpt prune RUN --grace 0` removes what it left, "
            "and `ckpt rebuild STEP` commits it; overwrite=True replaces it",
        )


def _manifest_size(store: Store, prefix: str) -> int | None:
    try:
        return store.size(under(prefix, MANIFEST))
    except NotFoundError:
        return None


def _not_committed(store: Store, prefix: str, *, is_begun: bool = False) -> NotFoundError:
    where = described(store, prefix)
    names = store.children(prefix)
    if is_begun or DATA in names:
        objects = len(store.list(under(prefix, DATA)))
        manifest = "an empty manifest" if is_begun else "no manifest"
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
    what = f"{len(names)} other files" if names else "nothing there"
    return NotFoundError(
        f"no checkpoint: {what}", where=where, hint="pass the folder of a run or of a step"
    )
