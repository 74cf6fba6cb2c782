"""The commit: data, manifest, done. And what may be said at each point where the power can fail.

1. Every rank writes its pack under a save id that was never used before, so nothing that exists
   is touched. A crash here leaves packs that no manifest names; readers do not see them and
   `prune` removes them.
2. All ranks meet, and say how long their packs are. From here on all packs are complete and
   durable: a store's sink returns from `finish` only then.
3. Rank 0 reads the records out of the packs, from the store and not from memory, and compares
   them. A crash or a disagreement here is as in 1.
4. Rank 0 creates the manifest: exclusively, or atomically over the old one when overwriting.
   Before that instant the step is what it was; after it the new one. If the answer to the create
   is lost (an error after success), the manifest is read back: if it carries our save id the
   commit happened.
5. When overwriting, the old data is freed. A crash before or in it leaves packs that no manifest
   names, as in 1.

A manifest names packs by its own save id, so whichever manifest is there names one save whole:
never a mixture. Where the store honours conditions (`Abilities.exclusive_create`), of two jobs that
save the same step exactly one returns, and the other removes what it wrote, and nothing else. Where
it ignores them, the store reads back what it put: then one that comes later is refused too, but of
two that put their manifests in the same instant both may believe that they won. The last writer has
replaced the other's step then; the data of that is an orphan which `prune` finds. The same is true
everywhere of two jobs that overwrite one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ckptkit.checkpoint.places import (
    MANIFEST,
    data_prefix,
    described,
    manifest_bytes,
    refuse_begun,
    under,
)
from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.packs import PackRecord, read_record
from ckptkit.checkpoint.workers import asked_in_threads, at_once
from ckptkit.checkpoint.write.assemble import assemble, missing_groups
from ckptkit.checkpoint.write.pack import groups_pack
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    PeerError,
    StepExistsError,
)
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.envelope import MAX_DOCUMENT_BYTES
from ckptkit.format.manifest import GROUPS_PACK, Manifest, PackInfo, pack_name
from ckptkit.storage import Store


def refuse_committed(store: Store, prefix: str) -> None:
    """Raise StepExistsError where the step is committed, or AlreadyExistsError where that was only
    begun.
    """
    if MANIFEST in store.children(prefix):
        refuse_begun(store, prefix)
        raise _exists(store, prefix)


def gather(
    store: Store,
    prefix: str,
    save_id: str,
    tables: ArrayTables | None = None,
    told: Sequence[int] | None = None,
) -> Manifest:
    """Read all records of a save, add the group documents that are missing, and make the
    manifest. Of the arrays, `tables` that are known are not read again. The sizes of the packs, by
    rank, are listed where nobody has `told` them: one that is wrong shows no record.
    """
    folder = data_prefix(prefix, save_id)
    tables = tables or ArrayTables()
    if told is None:
        sizes = {entry.key.rpartition("/")[2]: entry.size for entry in store.list(folder)}
    else:
        sizes = {pack_name(rank): size for rank, size in enumerate(told)}

    def read(rank: int) -> PackRecord:
        size = sizes.get(pack_name(rank))
        return read_record(store, folder, rank, save_id, tables, size=size)

    first = read(0)
    # At most one more than there are packs, which is then missing: the world size is only a number
    # in a file.
    count = min(first.record.save.world_size, len(sizes) + 1)
    readers = at_once(store.abilities)
    found = [first, *asked_in_threads(read, range(1, count), readers)]
    records, packs = [item.record for item in found], [item.pack for item in found]
    groups = missing_groups(records)
    if groups:
        # Over what a commit that did not finish may have left: nothing names that.
        data = groups_pack(groups)
        store.put(f"{folder}/{GROUPS_PACK}", data)
        packs.append(PackInfo(GROUPS_PACK, len(data), None))
    return assemble(records, packs)


def commit(store: Store, prefix: str, manifest: Manifest, *, overwrite: bool = False) -> None:
    """Make the step exist; see the module's docstring for why each point is safe."""
    old = committed_save_id(store, prefix) if overwrite else None
    publish(store, prefix, manifest, replace=overwrite)
    if old is not None and old != manifest.save.save_id:
        # The step is committed; what cannot be freed now is an orphan that `prune` finds.
        discard(store, prefix, old)


def tell_commit(ranks: Ranks, store: Store, prefix: str, save_id: str) -> None:
    """Rank 0, which has committed, tells the others, and waits for none of them."""
    try:
        ranks.share(lambda: "committed")
    except PeerError:
        # Rank 0 may have committed before it was lost, or before it could say so.
        if committed_save_id(store, prefix) != save_id:
            raise


def publish(store: Store, prefix: str, manifest: Manifest, *, replace: bool) -> None:
    """Put the manifest, and nothing else; StepExistsError says that another save's is there."""
    key = under(prefix, MANIFEST)
    data = manifest.to_bytes()
    # Read as every later reader will: what cannot be opened must never count as committed.
    # A table of arrays that was read so before, out of a record or a manifest, is not read again.
    Manifest.from_bytes(data, described(store, key), manifest.table)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise FormatError(
            f"the manifest would have more than {MAX_DOCUMENT_BYTES} bytes",
            where=described(store, key),
            value=len(data),
            hint="write larger chunks: Writer(chunk_bytes=…)",
        )
    try:
        store.put(key, data, exclusive=not replace)
    except CkptkitError as error:
        there = committed_save_id(store, prefix)
        if there == manifest.save.save_id:
            # The answer was lost, or the step is there but perhaps not durable: once more, which
            # changes nothing that can be seen. Elsewhere what is there is durable, and another save
            # may be about to replace it.
            if store.abilities.claims_names:
                store.put(key, data)
            return
        if there is not None and isinstance(error, AlreadyExistsError):
            raise _exists(store, prefix) from error
        raise


def committed_save_id(store: Store, prefix: str) -> str | None:
    """The save id of the step's manifest as it is in the store now; None where there is none."""
    try:
        data = manifest_bytes(store, prefix)
        if data is None:
            return None
        return Manifest.from_bytes(data, described(store, under(prefix, MANIFEST))).save.save_id
    except FormatError:
        return None


def discard(store: Store, prefix: str, save_id: str, pack: str = "") -> None:
    """Remove the packs (or one) of a save that will never be committed, as far as that is possible
    now; never those that the manifest names.
    """
    folder = data_prefix(prefix, save_id)
    with suppress(CkptkitError):
        if committed_save_id(store, prefix) == save_id:
            return
        store.delete([f"{folder}/{pack}"] if pack else [e.key for e in store.list(folder)])


def _exists(store: Store, prefix: str) -> StepExistsError:
    return StepExistsError(
        "the step is committed already",
        where=described(store, prefix),
        hint="save another step, delete this one first, or pass overwrite=True",
    )
