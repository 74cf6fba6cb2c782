"""What the numbers of each array are like, from one look at each of its chunks."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import Band, Limits, stored_arrays, stream
from ckptkit.checkpoint.workers import Progress
from ckptkit.model import DType

OCTAVES = 12
"""How many powers of two below the largest number the histogram shows, on each side of zero."""

_BLOCK = 1 << 14
# Exponents of float64, smaller ones together with the smallest.
_LEAST, _MOST = -1022, 1024
_SIDE = _MOST - _LEAST + 1

Numbers = npt.NDArray[Any]


class Tally:
    """What is counted of one array; several threads add to it in turn."""

    def __init__(self) -> None:
        self.count = self.nans = self.infinite = 0
        self.total = 0.0
        self.least, self.most = math.inf, -math.inf
        self.by_exponent = np.zeros(2 * _SIDE, np.int64)

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        """Count some numbers."""
        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            nans = int(np.isnan(numbers).sum())
            self.nans += nans
            self.infinite += len(numbers) - int(is_finite.sum()) - nans
            numbers = numbers[is_finite]
        if not len(numbers):
            return
        self.count += len(numbers)
        self.total += float(numbers.sum())
        self.least = min(self.least, float(numbers.min()))
        self.most = max(self.most, float(numbers.max()))
        numbers = numbers[numbers != 0]
        exponents = np.maximum(np.frexp(numbers)[1], _LEAST) - _LEAST + _SIDE * (numbers > 0)
        self.by_exponent += np.bincount(exponents, minlength=2 * _SIDE)

    def join(self, other: Tally) -> None:
        """Add what another one has counted."""
        self.count += other.count
        self.nans += other.nans
        self.infinite += other.infinite
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.by_exponent += other.by_exponent

    def row(self) -> list[Any]:
        """min, max, mean, zeros, NaNs, infinities, the power of two that no number reaches, and the
        bars of the histogram: from the largest negative numbers over those near zero to the largest
        positive ones, the highest bar being 999. Zeros alone have none.
        """
        zeros = self.count - int(self.by_exponent.sum())
        if not self.count:
            return [None, None, None, 0, self.nans, self.infinite, 0, []]
        negative, positive = self.by_exponent[:_SIDE], self.by_exponent[_SIDE:]
        used = np.flatnonzero(negative + positive)
        if not len(used):
            return [0.0, 0.0, 0.0, zeros, self.nans, self.infinite, 0, []]
        top = int(used[-1])
        low = max(0, top - OCTAVES + 1)
        near = zeros + int(negative[:low].sum() + positive[:low].sum())
        bars = np.concatenate([negative[low : top + 1][::-1], [near], positive[low : top + 1]])
        scaled = -(-bars * 999 // max(1, int(bars.max())))
        mean = self.total / self.count
        found = [self.least, self.most, mean if math.isfinite(mean) else None]
        return [*found, zeros, self.nans, self.infinite, top + _LEAST, scaled.tolist()]


def statistics_of(
    checkpoint: Checkpoint, limits: Limits, progress: Progress | None = None
) -> list[list[Any]]:
    """A row for each array of the manifest, in its order; of complex numbers both parts count."""
    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    names = checkpoint.manifest.table.names
    tallies = [Tally() for _ in names]
    lock = threading.Lock()

    def count(band: Band, values: Sequence[Numbers]) -> None:
        raw, dtype = values[0].reshape(-1), stored[names[band.item]].dtype
        here = Tally()
        # Sums of the largest numbers overflow, which is no news.
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(raw), _BLOCK):
                here.add(as_numbers(raw[begin : begin + _BLOCK], dtype))
            with lock:
                tallies[band.item].join(here)

    stream([[stored[name]] for name in names], count, limits, progress=progress)
    return [tally.row() for tally in tallies]


def as_numbers(raw: Numbers, dtype: DType) -> npt.NDArray[np.float64]:
    """Raw elements (`dtype.bits`) as float64."""
    if dtype.name == "complex_float16":
        return raw.view(np.float16).astype(np.float64)
    values = raw.view(dtype.numpy)
    if dtype.numpy.kind == "c":
        values = values.view(values.real.dtype)
    return values.astype(np.float64)
