"""Reading a step's tensors into the memory of live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import LayoutError
from ckptkit.live.state.parts import LiveTensor
from ckptkit.live.state.tensors import as_bits, dtype_of, torch_dtype
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box

_BATCH_BYTES = 256 << 20

Wanted = tuple[str, Box, npt.NDArray[Any]]
Inside = tuple[Any, ...]
"""An index: slices, and an ellipsis, so that it also gives a view of what has no dims."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor to fill, and the name that the step has it under."""

    held: LiveTensor
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Where tensors are filled from, and how."""

    checkpoint: Checkpoint
    topology: Topology
    verify: bool = True
    threads: int | None = None
    progress: Progress | None = None

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets, those in host memory directly."""
        checkpoint = self.checkpoint
        direct: list[Target] = []
        others: list[Target] = []
        for target in targets:
            (direct if _is_direct(checkpoint, target) else others).append(target)
        self.read([w for target in direct for w in self._wanted(target, _bits(target.held))])
        for batch in _batches(others):
            staged = [(target, _staged(checkpoint, target)) for target in batch]
            self.read([w for t, memory in staged for w in self._wanted(t, as_bits(t.name, memory))])
            for target, memory in staged:
                with torch.no_grad():
                    target.held.local.copy_(memory)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Read boxes into memory."""
        self.checkpoint.read_many(
            wanted, verify=self.verify, threads=self.threads, progress=self.progress
        )

    def boxes(self, target: Target, shape: Sequence[int]) -> list[tuple[Box, Inside]]:
        """The boxes of a target that this rank holds, and where each is in memory of a shape."""
        held = target.held
        part = held.part(self.topology)
        if not part.boxes and 0 in shape:
            return []  # torch's empty parts have lost their other dims
        if part.shape != tuple(shape):
            raise LayoutError(
                f"this rank should hold {part.shape} of {held.shape}, "
                f"but the tensor here has {tuple(shape)}",
                where=held.name,
                hint="if it was cut by hand, say how with rules={…}",
            )
        found: list[tuple[Box, Inside]] = []
        for box, place in zip(part.boxes, part.places, strict=True):
            ends = zip(place.offset, place.shape, strict=True)
            found.append((box, (*(slice(start, start + n) for start, n in ends), ...)))
        return found

    def _wanted(self, target: Target, memory: npt.NDArray[Any]) -> list[Wanted]:
        return [
            (target.name, box, memory[inside]) for box, inside in self.boxes(target, memory.shape)
        ]


def _is_direct(checkpoint: Checkpoint, target: Target) -> bool:
    local = target.held.local
    alike = checkpoint[target.name].dtype == dtype_of(target.name, local)
    return local.device.type == "cpu" and alike and not (local.is_conj() or local.is_neg())


def _bits(held: LiveTensor) -> npt.NDArray[Any]:
    return as_bits(held.name, held.local)


def _staged(checkpoint: Checkpoint, target: Target) -> torch.Tensor:
    """Host memory in the dtype of the step."""
    local = target.held.local
    dtype = torch_dtype(checkpoint[target.name].dtype)
    pinned = local.device.type == "cuda"
    return torch.empty(local.shape, dtype=dtype, pin_memory=pinned)


def _batches(targets: Sequence[Target]) -> list[list[Target]]:
    batches: list[list[Target]] = []
    size = 0
    for target in targets:
        if not batches or size + target.held.local.nbytes > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(target)
        size += target.held.local.nbytes
    return batches
