"""Reading a quarter of the columns of every matrix: bytes read over bytes needed."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import ckptkit
from benchmarks.ours import add_and_commit
from benchmarks.state import Part, llama
from benchmarks.table import Bar, Section
from ckptkit.model import Box
from ckptkit.storage import open_store
from tests.storage.counting import CountingStore

LIMIT = 1.15


def slices(folder: Path, gib: float) -> Section:
    """For a state that was cut by rows among 1, 2, 8 and 64 writers."""
    rows, bars = [], []
    for writers in (1, 2, 8, 64):
        place = folder / f"slices-{writers}"
        _save(place, gib, writers)
        for title, first, last in (("second quarter", 2, 4), ("a quarter off the grid", 1.3, 3.3)):
            for verify in (True, False):
                needed, read, requests, seconds = _measure(place, first / 8, last / 8, verify)
                checked = "checked" if verify else "unchecked"
                rows.append(
                    [
                        f"{_writers(writers)}, {title}, {checked}",
                        f"{needed / 1e6:.1f}",
                        f"{read / 1e6:.1f}",
                        f"{read / needed:.3f}",
                        str(requests),
                        f"{needed / seconds / 1e9:.2f}",
                    ]
                )
                if verify and first == 2:
                    what = f"column slice, {_writers(writers)}: bytes read / needed"
                    bars.append(Bar(what, read / needed, LIMIT, at_least=False))
        shutil.rmtree(place)
    columns = ["`[:, a:b]` of every 2-D array", "needed MB", "read MB", "ratio", "reads", "GB/s"]
    return Section("Column slices at the default chunking", columns, rows, bars)


def _writers(count: int) -> str:
    return "1 writer" if count == 1 else f"{count} writers"


def _save(place: Path, gib: float, writers: int) -> None:
    """One thread a rank."""
    tensors = llama(gib)
    barriers = ckptkit.ThreadBarrier.group(writers)
    with ThreadPoolExecutor(writers) as executor:
        saves = [
            executor.submit(add_and_commit, Part(tensors, barrier.rank, writers), place, barrier)
            for barrier in barriers
        ]
        for save in saves:
            save.result()


def _measure(place: Path, begin: float, end: float, verify: bool) -> tuple[int, int, int, float]:  # noqa: FBT001
    """(bytes needed, bytes read, reads, seconds); opening the step is not counted."""
    store = CountingStore(open_store(place))
    needed = 0
    with ckptkit.open(store) as step:
        matrices = [array for array in step.arrays.values() if len(array.shape) == 2]
        wanted = []
        for array in matrices:
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
