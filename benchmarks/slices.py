"""Reading a quarter of the columns of every matrix: bytes read over bytes needed."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import ckptkit
from benchmarks.ours import add_and_commit
from benchmarks.state import Part, Tensor, llama
from benchmarks.table import Bar, Section
from ckptkit.model import Box
from ckptkit.storage import open_store
from tests.storage.counting import CountingStore

LIMIT = 1.15


def slices(folder: Path, gib: float) -> Section:
    """For a state that was cut by rows among 1, 2, 8 and 64 writers."""
    rows, bars = [], []
    for writers, is_known in ((1, False), (2, False), (8, False), (64, False), (8, True)):
        place = folder / f"slices-{writers}"
        tensors = llama(gib)
        _save(place, tensors, writers, is_known=is_known)
        cut = [t.name for t in tensors if len(t.shape) == 2 and not (is_known and t.sliced == (0,))]
        for title, first, last in (("second quarter", 2, 4), ("a quarter off the grid", 1.3, 3.3)):
            for verify in (True, False):
                needed, read, requests, seconds = _measure(place, cut, first / 8, last / 8, verify)
                checked = "checked" if verify else "unchecked"
                rows.append(
                    [
                        f"{_writers(writers, is_known)}, {title}, {checked}",
                        f"{needed / 1e6:.1f}",
                        f"{read / 1e6:.1f}",
                        f"{read / needed:.3f}",
                        str(requests),
                        f"{needed / seconds / 1e9:.2f}",
                    ]
                )
                if verify and first == 2:
                    what = f"column slice, {_writers(writers, is_known)}: bytes read / needed"
                    bars.append(Bar(what, read / needed, LIMIT, at_least=False))
        shutil.rmtree(place)
    columns = ["`[:, a:b]` of every 2-D array", "needed MB", "read MB", "ratio", "reads", "GB/s"]
    note = (
        "Writers that know by rules which arrays are cut by columns leave the rows of all others "
        "whole: of theirs, those arrays are sliced."
    )
    return Section("Column slices at the default chunking", columns, rows, bars, [note])


def _writers(count: int, is_known: bool) -> str:  # noqa: FBT001
    who = "1 writer" if count == 1 else f"{count} writers"
    return f"{who} that know rules" if is_known else who


def _save(place: Path, tensors: list[Tensor], writers: int, *, is_known: bool) -> None:
    """One thread a rank."""
    add = partial(add_and_commit, is_known=is_known)
    barriers = ckptkit.ThreadBarrier.group(writers)
    with ThreadPoolExecutor(writers) as executor:
        saves = [
            executor.submit(add, Part(tensors, barrier.rank, writers), place, barrier)
            for barrier in barriers
        ]
        for save in saves:
            save.result()


def _measure(
    place: Path,
    names: list[str],
    begin: float,
    end: float,
    verify: bool,  # noqa: FBT001
) -> tuple[int, int, int, float]:
    """(bytes needed, bytes read, reads, seconds); opening the step is not counted."""
    store = CountingStore(open_store(place))
    needed = 0
    with ckptkit.open(store) as step:
        wanted = []
        for array in map(step.__getitem__, names):
            rows, columns = array.shape
            low, high = int(columns * begin), int(columns * end)
            box = Box((0, low), (rows, high - low))
            out = np.zeros(box.shape, array.dtype.numpy)
            wanted.append((array.name, box, out))
            needed += out.nbytes
        store.reset()
        start = time.monotonic()
        step.read_many(wanted, verify=verify)
        seconds = time.monotonic() - start
    return needed, store.bytes_read, store.operations["read_into"], seconds
