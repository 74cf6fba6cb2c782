"""Contenders over an object store: ckptkit, DCP through fsspec, and the client library itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ckptkit
from benchmarks.bucket import Bucket
from benchmarks.ours import add_part
from benchmarks.state import Memory, Part


@dataclass(frozen=True, slots=True)
class ToBucket:
    """A step of `fsdp:N`, every tensor cut by rows; the ranks meet in a local folder."""

    part: Part
    bucket: Bucket
    engine: str = "obstore"

    def save(self, folder: Path) -> None:
        """Write, meet and commit."""
        rank, ranks = self.part.rank, self.part.world_size
        with ckptkit.Writer(
            self.bucket.url(folder.name),
            step=1,
            strategy=f"fsdp:{ranks}",
            rank=rank,
            barrier=ckptkit.FileBarrier(folder / "barrier", rank, ranks) if ranks > 1 else None,
            storage_options={**self.bucket.options, "engine": self.engine},
        ) as writer:
            add_part(writer, self.part)

    def load(self, folder: Path) -> None:
        """Read this rank's rows of every tensor, checked."""
        options = {**self.bucket.options, "engine": self.engine}
        with ckptkit.open(self.bucket.url(folder.name), storage_options=options) as step:
            step.read_many(
                [
                    (name, box, array)
                    for name, array in self.part.arrays.items()
                    for box in step[name].part(self.part.rank).boxes
                ]
            )


@dataclass(frozen=True, slots=True)
class Raw:
    """obstore alone: one multipart upload, and ranged reads by a few threads."""

    held: Memory
    bucket: Bucket
    at_once: int
    mib: int

    def save(self, folder: Path) -> None:
        """The memory of the rank, streamed."""
        import obstore  # noqa: PLC0415

        chunk = self.mib << 20
        store, key = self.bucket.raw(), f"{folder.name}/{self.held.rank}"
        obstore.put(store, key, self._pieces(chunk), chunk_size=chunk, max_concurrency=self.at_once)

    def load(self, folder: Path) -> None:
        """Every byte, in order; what comes is not even copied into the tensors."""
        import obstore  # noqa: PLC0415

        store, key = self.bucket.raw(), f"{folder.name}/{self.held.rank}"
        chunk, size = self.mib << 20, self.held.nbytes

        def read(begin: int) -> None:
            obstore.get_range(store, key, start=begin, end=min(begin + chunk, size))

        with ThreadPoolExecutor(self.at_once) as executor:
            for _ in executor.map(read, range(0, size, chunk)):
                pass

    def _pieces(self, chunk: int) -> Iterator[memoryview]:
        for flat in self.held.flat():
            for begin in range(0, len(flat), chunk):
                yield np.ascontiguousarray(flat[begin : begin + chunk]).data
