"""How much memory activations take: of one rank, and of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a store, in bytes; tensors that share memory are counted once.

    >>> print(MemoryStats(current=2048, peak=4096, count=2))
    2 activations, 2.0 KiB (peak 4.0 KiB)
    """

    current: int = 0
    peak: int = 0
    count: int = 0
    """How many activations are held."""
    on_host: int = 0
    """The part of `current` that has been moved to host memory."""
    evicted: int = 0
    """How many were dropped to stay within the budget."""

    def __str__(self) -> str:
        return f"{self.count} activations, {in_words(self.current)} (peak {in_words(self.peak)})"

    def to_dict(self) -> dict[str, int]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GroupMemoryStats:
    """The memory of the stores of all ranks, at one time.

    >>> stats = GroupMemoryStats((MemoryStats(100, 300, 1), MemoryStats(200, 200, 2)), 0.0)
    >>> stats.total, stats.peak, stats.counts
    (300, 500, (1, 2))
    """

    ranks: tuple[MemoryStats, ...]
    timestamp: float
    """Seconds since 1970."""

    @property
    def total(self) -> int:
        """The bytes of all ranks."""
        return sum(self._current())

    @property
    def peak(self) -> int:
        """The sum of what each rank had at its own peak."""
        return sum(rank.peak for rank in self.ranks)

    @property
    def per_rank(self) -> tuple[int, ...]:
        """The bytes of each rank."""
        return tuple(self._current())

    @property
    def mean(self) -> float:
        """The bytes of a rank on average."""
        return self.total / max(len(self.ranks), 1)

    @property
    def max(self) -> int:
        """The bytes of the rank that has most."""
        return max(self._current(), default=0)

    @property
    def min(self) -> int:
        """The bytes of the rank that has least."""
        return min(self._current(), default=0)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many activations each rank holds."""
        return tuple(rank.count for rank in self.ranks)

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = [
            (
                f"activations of {len(self.ranks)} ranks at {when}: {sum(self.counts)}, "
                f"{in_words(self.total)} (peak {in_words(self.peak)}, mean {in_words(self.mean)}, "
                f"min {in_words(self.min)}, max {in_words(self.max)})"
            )
        ]
        lines += [f"  rank {number}: {rank}" for number, rank in enumerate(self.ranks)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "timestamp": self.timestamp,
            "total": self.total,
            "peak": self.peak,
            "mean": self.mean,
            "max": self.max,
            "min": self.min,
            "per_rank": list(self.per_rank),
            "counts": list(self.counts),
            "ranks": [rank.to_dict() for rank in self.ranks],
        }

    def _current(self) -> Sequence[int]:
        return [rank.current for rank in self.ranks]


def in_words(size: float) -> str:
    """A number of bytes, for people."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
