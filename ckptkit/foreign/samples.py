"""Some elements of tensors: where nothing else tells which file is whose, they do."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box, DType

# Of larger tensors so many runs of so many elements are compared.
_SAMPLES, _SAMPLE = 4, 64
# So many of the paddings of a rank are looked at.
_PADDINGS = 64
# So many files are named in a message.
_NAMED = 8


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Elements in the order of a parameter, or of a bucket, in stretches that are each one run of
    bytes in a file.
    """

    dtype: DType
    stretches: tuple[Extent, ...]
    starts: tuple[int, ...]
    """The first element of each, and behind the last the number of all."""

    @classmethod
    def of(cls, dtype: DType, stretches: Sequence[Extent]) -> Stretches:
        starts = accumulate((extent.box.size for extent in stretches), initial=0)
        return cls(dtype, tuple(stretches), tuple(starts))

    @property
    def size(self) -> int:
        return self.starts[-1]

    def between(self, begin: int, end: int) -> Iterator[tuple[Extent, int, int]]:
        """The stretches of some elements, each with those that count, from its own first on."""
        at = bisect.bisect_right(self.starts, begin) - 1
        while at < len(self.stretches) and self.starts[at] < end:
            first, after = self.starts[at : at + 2]
            if max(begin, first) < min(end, after):
                yield self.stretches[at], max(begin, first) - first, min(end, after) - first
            at += 1


def check_copies(
    folder: Folder, masters: Mapping[str, StateTensor], copies: Mapping[str, StateTensor]
) -> None:
    """Refuse master weights that are not, rounded, the copies that the model has of them. In each
    run of elements that a file has of a weight, the first and the last ones are compared, and some
    between.
    """
    runs: list[tuple[Stretches, Stretches, int, int]] = []
    for name, master in masters.items():
        mine, copy = _row(master), _row(copies[name])
        if mine is None or copy is None or not copy.dtype.name.startswith(("float", "bfloat")):
            continue
        runs += [(mine, copy, begin, end - begin) for begin, end in pairwise(mine.starts)]
    of_masters = samples(folder, [(mine, begin, size) for mine, _, begin, size in runs])
    of_copies = samples(folder, [(copy, begin, size) for _, copy, begin, size in runs])
    compared: dict[tuple[str, str], bool] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for run, exact, rounded in zip(runs, of_masters, of_copies, strict=True):
            mine, copy, begin, size = run
            expected = exact.astype(rounded.dtype)
            is_alike = (expected == rounded) | (np.isnan(expected) & np.isnan(rounded))
            extent = next(extent for extent, *_ in mine.between(begin, begin + size))
            files = (extent.file, copy.stretches[0].file)
            compared[files] = compared.get(files, True) and bool(is_alike.all())
    wrong = [files for files, is_alike in compared.items() if not is_alike]
    if wrong:
        file, model = wrong[0]
        raise FormatError(
            f"its weights, rounded, are not the copies in {model.rpartition('/')[2]}",
            where=folder.where(file),
            value=[file.rpartition("/")[2] for file, _ in wrong][:_NAMED],
            hint="the files are of different saves, or have each other's names: copy the folder "
            f"again. Named by itself, {model.rpartition('/')[2]} is read with the copies that it "
            "has",
        )


def check_paddings(
    folder: Folder,
    paddings: Sequence[Sequence[tuple[int, int, int]]],
    states: Sequence[Sequence[Sequence[Any]]],
    files: Sequence[str],
) -> None:
    """Refuse files of ranks that have each other's names, as far as padding shows it: no gradient
    reaches that, so a state is zero there. `paddings` are told by rank as (row, start, count),
    states by rank and row.
    """

    def is_zero(rank: int, file: int) -> bool:
        rows = [
            (Stretches.of(tensor.dtype, tensor.extents), start, count)
            for row, start, count in paddings[rank][:_PADDINGS]
            for state in states
            if isinstance(tensor := state[file][row], StateTensor)
        ]
        return not any(sample.any() for sample in samples(folder, rows))

    for rank, file in enumerate(files):
        if is_zero(rank, rank):
            continue
        # With an optimizer that has something there, all files do.
        others = (n for n in range(len(files)) if n != rank and is_zero(rank, n))
        if (other := next(others, None)) is not None:
            raise FormatError(
                f"where rank {rank} has only padding there is a state, which is zero in that of "
                f"rank {other}",
                where=file,
                value=[each.rpartition("/")[2] for each in (file, files[other])],
                hint="the files have each other's names: copy the folder again",
            )


def check_step(
    folder: Folder, states: Mapping[str, Mapping[str, Any]], steps: Any, where: str
) -> None:
    """Refuse a model's file, which says how many steps there were, that is older than those of the
    optimizer.
    """
    step: Any = next((state.get("step") for state in states.values()), None)
    if isinstance(step, StateTensor) and step.extents and step.dtype.name in ("float32", "int64"):
        extent = step.extents[0]
        data = folder.read(extent.file, extent.offset, step.dtype.itemsize)
        step = np.frombuffer(data, step.dtype.name)[0].item()
    if type(steps) is int and type(step) in (int, float) and step > steps:
        raise FormatError(
            f"the model is of step {steps}, the optimizer has made {step:g}",
            where=where,
            hint="the files are of different saves; copy the folder of one of them again",
        )


def _row(tensor: StateTensor) -> Stretches | None:
    """A tensor as one row of its elements; None where it does not lie so."""
    parts = sorted(tensor.extents, key=lambda extent: extent.box.offset)
    is_row = tensor.is_flat or [part.box for part in parts] == [Box.whole(tensor.shape)]
    if not is_row or any(part.strides for part in parts):
        return None
    return Stretches.of(tensor.dtype, parts)


def samples(
    folder: Folder, rows: Sequence[tuple[Stretches, int, int]]
) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
    """Some elements of stretches of rows, which are told by where they begin and how many they are;
    of stretches of one length those at the same places.
    """
    ranges: list[list[tuple[str, int, int]]] = []
    for row, begin, size in rows:
        mine = []
        for first, last in sampled(size):
            for extent, low, high in row.between(begin + first, begin + last):
                width = row.dtype.itemsize
                mine.append((extent.file, extent.offset + low * width, (high - low) * width))
        ranges.append(mine)
    by_file: dict[str, set[tuple[int, int]]] = {}
    for file, offset, length in (each for mine in ranges for each in mine):
        by_file.setdefault(file, set()).add((offset, length))
    read: dict[tuple[str, int, int], bytes] = {}
    for file, there in by_file.items():
        ordered = sorted(there)
        for (offset, length), data in zip(ordered, folder.read_many(file, ordered), strict=True):
            read[file, offset, length] = data
    return [
        np.frombuffer(b"".join(read[each] for each in mine), dtype=row.dtype.numpy)
        for mine, (row, _, _) in zip(ranges, rows, strict=True)
    ]


def sampled(size: int) -> list[tuple[int, int]]:
    if size <= _SAMPLES * _SAMPLE:
        return [(0, size)]
    first = [(size - _SAMPLE) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
    return [(at, at + _SAMPLE) for at in first]
