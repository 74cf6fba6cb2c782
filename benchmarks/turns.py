"""Many simulated ranks in one process: one saves after the other, only rank 0 waits for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ckptkit
from ckptkit.checkpoint.ranks import Failure
from ckptkit.storage import Store


@dataclass(slots=True)
class _Meeting:
    world_size: int
    value: bytes = b""
    said: dict[int, bytes] = field(default_factory=dict)
    shared: threading.Event = field(default_factory=threading.Event)
    all_here: threading.Event = field(default_factory=threading.Event)


class _Turn(ckptkit.Ranks):
    """Holds up rank 0 only: the others are done when they have written."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.meeting = meeting

    def leave(self, problem: BaseException | str) -> Failure:
        if self.rank == 0:
            self.meeting.shared.set()
        return Failure.of(self.rank, problem)

    def _tell(self, data: bytes) -> bytes:
        if self.rank == 0:
            self.meeting.value = data
            self.meeting.shared.set()
        self.meeting.shared.wait()
        return self.meeting.value

    def _meet(self, data: bytes | None) -> list[bytes]:
        said = self.meeting.said
        said[self.rank] = data or b""
        if self.rank:
            return []
        self.meeting.all_here.wait()
        return [] if data is None else [said[rank] for rank in range(self.world_size)]


def save_in_turns(
    place: Path | Store, strategy: str, ranks: int, add: Callable[[ckptkit.Writer], None]
) -> tuple[list[float], float]:
    """One save by all ranks; the seconds of each rank but 0, and those that the commit took."""
    meeting = _Meeting(ranks)
    failed: list[BaseException] = []

    def save(rank: int) -> None:
        barrier = _Turn(rank, meeting)
        with ckptkit.Writer(place, step=1, strategy=strategy, rank=rank, barrier=barrier) as writer:
            add(writer)

    def lead() -> None:
        try:
            save(0)
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that waits for it
            failed.append(error)

    leader = threading.Thread(target=lead)
    leader.start()
    meeting.shared.wait()
    spans = []
    for rank in range(1, ranks):
        start = time.monotonic()
        save(rank)
        spans.append(time.monotonic() - start)
    start = time.monotonic()
    meeting.all_here.set()
    leader.join()
    if failed:
        raise failed[0]
    return spans, time.monotonic() - start
