"""The packs of a step, opened when first read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.checkpoint.places import data_prefix, described
from ckptkit.errors import CorruptionError, NotFoundError
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Source, Store

# Processes may often open 1,024 files; what is beyond this is opened for each read.
_KEPT_OPEN = 400


class Sources:
    """Open packs by number; safe to use from any thread, except `close`."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest) -> None:
        self._store = store
        self._folder = data_prefix(prefix, manifest.save.save_id)
        self._packs = manifest.packs
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def where(self, pack: int) -> str:
        """A pack's place, for messages."""
        return described(self._store, self._key(pack))

    @contextmanager
    def use(self, pack: int) -> Iterator[Source]:
        """An open pack, for as long as the block lasts at least."""
        kept = self._open.get(pack) or self._keep(pack)
        if kept is not None:
            yield kept
            return
        with self._opened(pack) as source:
            yield source

    def close(self) -> None:
        """Close all."""
        with self._lock:
            closing, self._open = self._open, {}
        for source in closing.values():
            source.close()

    def _keep(self, pack: int) -> Source | None:
        with self._lock:
            if pack not in self._open and len(self._open) < _KEPT_OPEN:
                self._open[pack] = self._opened(pack)
            return self._open.get(pack)

    def _opened(self, pack: int) -> Source:
        try:
            source = self._store.open(self._key(pack))
        except NotFoundError as error:
            raise CorruptionError(
                "a pack of the step is missing",
                where=self.where(pack),
                hint="`ckpt verify` lists all damage; `ckpt ls RUN` shows the other steps",
            ) from error
        if source.size != self._packs[pack].size:
            source.close()
            raise CorruptionError(
                f"the pack has {source.size} bytes, written were {self._packs[pack].size}",
                where=self.where(pack),
                hint="`ckpt verify` lists all damage; `ckpt ls RUN` shows the other steps",
            )
        return source

    def _key(self, pack: int) -> str:
        return f"{self._folder}/{self._packs[pack].name}"
