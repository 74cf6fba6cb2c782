"""One attempt to save a step, as all ranks go through it: begin, (write,) end."""

from __future__ import annotations

import time
from typing import Any

from ckptkit.checkpoint.commit import (
    commit,
    committed_save_id,
    discard,
    gather,
    refuse_committed,
)
from ckptkit.checkpoint.places import new_save_id
from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import GivenUpError, PeerError, StepExistsError
from ckptkit.format.manifest import pack_name
from ckptkit.format.objects import check_total
from ckptkit.format.record import SaveInfo
from ckptkit.model import Strategy
from ckptkit.storage import Store
from ckptkit.version import __version__


class Attempt:
    """What one rank does of a save besides writing its pack.

    Only rank 0 commits. Until all packs are complete every failure is a failure of all; once the
    manifest is there the step exists, and no rank says otherwise, whatever happens to the others.
    """

    def __init__(self, store: Store, prefix: str, barrier: Ranks, *, overwrite: bool) -> None:
        self._store = store
        self._prefix = prefix
        self._barrier = barrier
        self._overwrite = overwrite

    def begin(
        self, step: int, strategy: Strategy, details: dict[str, Any], digest: bytes
    ) -> tuple[SaveInfo, bool]:
        """Agree on the save id and the time, both rank 0's, and say whether the digest of this
        rank's array table is rank 0's too: then its record may refer to rank 0's.
        """

        def of_first() -> tuple[str, float, bytes]:
            if not self._overwrite:
                refuse_committed(self._store, self._prefix)
            return new_save_id(), time.time(), digest

        save_id, seconds, first = self._barrier.share(of_first)
        if self._barrier.rank == 0 and not self._overwrite:
            # Before the data, so that nobody waits for it at the end, when the store is busy.
            self._store.learn(self._prefix)
        save = SaveInfo(
            save_id=save_id,
            step=step,
            time=seconds,
            writer=f"ckptkit {__version__}",
            world_size=strategy.world_size,
            strategy=strategy,
            details=details,
        )
        return save, self._barrier.rank > 0 and first == digest

    def end(self, save: SaveInfo) -> None:
        """With this rank's pack complete: return when the step exists, or raise."""
        self._meet(save)
        if self._barrier.rank == 0:
            self._commit(save)
            # Rank 0 tells the others and does not wait for them: the step exists already.
            self._barrier.share(lambda: "committed")
            return
        try:
            self._barrier.share(lambda: "")
        except PeerError:
            # Rank 0 may have committed before it was lost, or before it could say so.
            if committed_save_id(self._store, self._prefix) != save.save_id:
                raise

    def _meet(self, save: SaveInfo) -> None:
        """Wait until all packs are complete; where it is certain that rank 0 will never commit
        them, remove this rank's own.

        Others may still be writing theirs, and remove them when they come here. After a time-out
        on another rank nothing is certain: then the pack stays, for `prune`.
        """
        try:
            self._barrier.wait()
        except BaseException as error:
            if self._barrier.rank == 0 or isinstance(error, GivenUpError):
                self._discard(save, pack_name(self._barrier.rank))
            raise

    def _commit(self, save: SaveInfo) -> None:
        try:
            manifest = gather(self._store, self._prefix, save.save_id)
            for item in manifest.objects:
                check_total(item)
        except BaseException:
            # Only rank 0 ever commits, and now it will not; all others have finished writing.
            self._discard(save)
            raise
        try:
            commit(self._store, self._prefix, manifest, overwrite=self._overwrite)
        except StepExistsError:
            # Another save has won the step for good: nothing will ever name this data.
            self._discard(save)
            raise

    def _discard(self, save: SaveInfo, pack: str = "") -> None:
        discard(self._store, self._prefix, save.save_id, pack)
