"""How much is asked of a store at a time: what it does well, within the memory there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptkit.checkpoint.workers import at_once, cores
from ckptkit.storage import Store

# A request is in memory twice for a moment: as it came, and where it was asked for.
_COPIES = 2
_LEAST_REQUEST = 1 << 20
# Above that, many requests at a time are worth more than larger ones.
_GOOD_REQUEST = 8 << 20
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """How a store is read: the size of requests, how many there are at a time, and what they may
    take along that nobody needs.
    """

    requests: int
    request_bytes: int
    gap_bytes: int
    by_rows: bool
    """Whether many small reads cost little: then some rows of many chunks are read at a time."""

    @classmethod
    def of(cls, store: Store, memory: int | None = None) -> Pace:
        """What a store likes best; elsewhere than in a file system never more than `memory` is on
        its way.
        """
        can = store.abilities
        if not can.waits_for_answers:
            # As many as copy at a time, since reading is copying there.
            requests = min(_MOST_THREADS, can.concurrency or cores())
            return cls(requests, can.request_bytes, can.gap_bytes, by_rows=True)
        whole = cls(at_once(can), can.request_bytes, can.gap_bytes, by_rows=False)
        return whole if memory is None else whole.within(memory)

    @property
    def nbytes(self) -> int:
        """The most that is on its way, besides what the caller reads into."""
        return 0 if self.by_rows else self.requests * self.request_bytes * _COPIES

    def within(self, memory: int) -> Pace:
        """The same in so much memory: smaller requests, as long as they are good ones, then fewer
        of them, and where even one is too much a smaller one.
        """
        if self.by_rows or self.nbytes <= memory:
            return self
        room = memory // _COPIES
        good = min(self.request_bytes, max(_GOOD_REQUEST, room // self.requests))
        requests = min(self.requests, max(1, room // good))
        return self._sized(requests, room // requests)

    def shared(self, workers: int) -> Pace:
        """What each of some workers gets of it; in a file system, where each does its own reading,
        one request.
        """
        if self.by_rows:
            return replace(self, requests=1)
        requests = max(1, self.requests // workers)
        return self._sized(requests, self.requests * self.request_bytes // (requests * workers))

    def _sized(self, requests: int, size: int) -> Pace:
        size = min(self.request_bytes, max(_LEAST_REQUEST, size))
        gap = min(self.gap_bytes, self.gap_bytes * size // min(_GOOD_REQUEST, self.request_bytes))
        return replace(self, requests=requests, request_bytes=size, gap_bytes=gap)
