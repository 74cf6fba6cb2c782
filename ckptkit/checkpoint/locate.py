"""From a location to a committed step: the step itself, or the newest one of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptkit.checkpoint.foreign import FOREIGN_HINT, foreign
from ckptkit.checkpoint.pace import ask_all
from ckptkit.checkpoint.places import DATA, MANIFEST, described, step_number, under
from ckptkit.errors import AlreadyExistsError, FormatError, NotCommittedError, NotFoundError
from ckptkit.format.envelope import MAX_DOCUMENT_BYTES
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Store


def read_manifest(store: Store, prefix: str) -> Manifest:
    """The manifest of a step; NotCommittedError or NotFoundError where there is none."""
    data = manifest_bytes(store, prefix)
    if not data:
        raise _not_committed(store, prefix, store.children(prefix), is_begun=data is not None)
    return _manifest(store, prefix, data)


def manifest_bytes(store: Store, prefix: str) -> bytes | None:
    """The manifest as it is stored, in one request; None where there is none, and nothing in one
    that was only begun.
    """
    try:
        return store.read_whole(under(prefix, MANIFEST), MAX_DOCUMENT_BYTES)
    except NotFoundError:
        return None


def _manifest(store: Store, prefix: str, data: bytes) -> Manifest:
    where = described(store, under(prefix, MANIFEST))
    manifest = Manifest.from_bytes(data, where)
    number = step_number(prefix or store.location.name)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the manifest is of step {manifest.save.step}, the folder of step {number}",
            where=where,
            hint="the folder was renamed; give it its own name again",
        )
    return manifest


def manifest_at(store: Store) -> tuple[str, Manifest]:
    """(prefix in the store, manifest) of the step at its location, or of the newest one of the
    run there: one request for a step that has its own name, and two for a run.
    """
    if step_number(store.location.name) is not None and (data := manifest_bytes(store, "")):
        return "", _manifest(store, "", data)
    names = store.children("")
    if MANIFEST in names or DATA in names:
        return "", read_manifest(store, "")
    for _, prefix in sorted(_numbered(names).items(), reverse=True):
        if data := manifest_bytes(store, prefix):
            return prefix, _manifest(store, prefix, data)
    raise _not_committed(store, "", names)


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
    sizes = ask_all(store, lambda name: _manifest_size(store, name), folders.values())
    return {
        number: name for (number, name), size in zip(folders.items(), sizes, strict=True) if size
    }


def newest_step(store: Store) -> int | None:
    """The committed step of a run with the highest number, looked for from there."""
    newest_first = sorted(step_folders(store).items(), reverse=True)
    return next((number for number, name in newest_first if _manifest_size(store, name)), None)


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


def _not_committed(
    store: Store, prefix: str, names: Sequence[str], *, is_begun: bool = False
) -> NotFoundError:
    where = described(store, prefix)
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
    if what := foreign(store, names):
        return NotFoundError(
            f"no checkpoint of ckptkit, but {what}", where=where, hint=FOREIGN_HINT
        )
    what = f"{len(names)} other files" if names else "nothing there"
    return NotFoundError(
        f"no checkpoint: {what}", where=where, hint="pass the folder of a run or of a step"
    )
