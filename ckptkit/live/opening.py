"""All ranks open the same step, even while others are being saved: rank 0 reads the manifest, and
the others have it from there.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.checkpoint.places import described
from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.format.manifest import Manifest
from ckptkit.live.ranks import bytes_of_first
from ckptkit.storage import Store


def open_together(barrier: Ranks, store: Store, find: Callable[[], Checkpoint]) -> Checkpoint:
    """Open what rank 0 finds in the store: a collective call, in the thread that trains.

    An error of rank 0 reaches the others before anyone begins to wait for bytes.
    """
    if barrier.world_size == 1:
        return find()
    if barrier.rank == 0:
        found = find()
        data = found.manifest.to_bytes()
        barrier.share(lambda: (len(data), found.prefix))
        barrier.wait()
        bytes_of_first(data, len(data))
        return found
    size, prefix = barrier.share(lambda: None)
    # A rank that has left would be missing in the collective: nobody begins it without all.
    barrier.wait()
    data = bytes_of_first(None, size)
    return Checkpoint(store, prefix, Manifest.from_bytes(data, described(store, prefix)))
