"""ckptkit, through its public interface; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ckptkit
from benchmarks.state import Part
from ckptkit.checkpoint.workers import copy_threads
from ckptkit.storage import Store


@dataclass(frozen=True, slots=True)
class Ckptkit:
    """A step written by `fsdp:N`, every tensor cut by rows."""

    part: Part
    verify: bool = True

    def save(self, folder: Path) -> None:
        """Write, meet and commit."""
        rank, ranks = self.part.rank, self.part.world_size
        barrier = ckptkit.FileBarrier(folder / "barrier", rank, ranks) if ranks > 1 else None
        add_and_commit(self.part, folder / "run", barrier)

    def load(self, folder: Path) -> None:
        """Read this rank's rows of every tensor."""
        with ckptkit.open(folder / "run") as step:
            wanted = [
                (name, box, array)
                for name, array in self.part.arrays.items()
                for box in step[name].part(self.part.rank).boxes
            ]
            # As a job divides the cores of its machine.
            threads = copy_threads(self.part.world_size)
            step.read_many(wanted, verify=self.verify, threads=threads, alone=True)


def add_and_commit(
    part: Part, place: Path | Store, barrier: ckptkit.Ranks | None, *, is_known: bool = True
) -> None:
    """One rank's save; `is_known` as in `add_part`."""
    strategy = f"fsdp:{part.world_size}"
    with ckptkit.Writer(
        place, step=1, strategy=strategy, rank=part.rank, barrier=barrier
    ) as writer:
        add_part(writer, part, is_known=is_known)


def add_part(writer: ckptkit.Writer, part: Part, *, is_known: bool = True) -> None:
    """All that one rank holds. What `Checkpointer` finds out by the names of a model is said here:
    which dims other layouts may cut.
    """
    for tensor in part.tensors:
        writer.add(
            tensor.name,
            part.arrays[tensor.name],
            shape=tensor.shape,
            dtype=tensor.dtype,
            placements={"fsdp": "shard(0)"},
            role="optimizer" if tensor.of else "param",
            of=tensor.of,
            sliced=tensor.sliced if is_known else None,
        )
