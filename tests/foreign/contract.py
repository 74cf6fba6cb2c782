"""What everybody may expect of a foreign checkpoint, whatever its format: each format's tests make
a `Sample` and run these.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckptkit
from ckptkit.errors import CkptkitError
from tests.foreign import loading
from tests.live.pool import Pool
from tests.storage.counting import CountingStore

# Of any architecture: the last dim of what has up to three.
LAST_DIM: dict[str, Any] = {
    "rules": [{"match": "*", "ndim": n, "tp": f"shard({n - 1})"} for n in (1, 2, 3)],
    "default": "replicate",
}


@dataclass(frozen=True)
class Sample:
    """A checkpoint that its framework wrote: where it is, and what is in it, by our names."""

    place: Path
    arrays: Mapping[str, npt.NDArray[Any]]
    parts: tuple[str, ...]
    """The files that tensors are in, or that say where."""


def same(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    """Whether two arrays are alike to the bit."""
    return (
        found.shape == wanted.shape
        and found.dtype.itemsize == wanted.dtype.itemsize
        and found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    )


def read_all(place: Path, names: Iterable[str] | None = None) -> None:
    """Read these arrays of a checkpoint, or those that it says it has."""
    with ckptkit.open(place) as checkpoint:
        for name in checkpoint.arrays if names is None else names:
            checkpoint.read(name)


class Reading:
    """Each tensor is what its framework loads. Subclasses have a fixture `sample`."""

    def test_every_tensor_is_what_the_framework_loads(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert set(checkpoint.arrays) == set(sample.arrays)
            for name, wanted in sample.arrays.items():
                assert same(checkpoint[name][...], wanted), name


class BitForBit(Reading):
    """However a checkpoint was spread, its tensors are these on every way out of it."""

    def test_it_becomes_a_step_that_holds_the_same(self, sample: Sample, tmp_path: Path) -> None:
        """Of ranks of FSDP, and from there of ranks that cut other dims."""
        one, other = tmp_path / "fsdp", tmp_path / "tp"
        ckptkit.reshard(sample.place, one, to="fsdp:3")
        ckptkit.reshard(one, other, to="tp:2", rules=LAST_DIM)
        said = ckptkit.digest(sample.place).step
        for run in (one, other):
            assert ckptkit.digest(run).step == said
            assert ckptkit.diff(sample.place, run).same
            assert not ckptkit.verify(run)
            with ckptkit.open(run) as checkpoint:
                for name, wanted in sample.arrays.items():
                    assert same(checkpoint[name][...], wanted), name

    def test_a_job_of_two_ranks_goes_on_with_it(self, sample: Sample, gloo: Pool) -> None:
        """Under FSDP, and where each tensor is cut along its last dim."""
        for found in gloo.run(2, loading.differing, str(sample.place), dict(sample.arrays)):
            assert found == []

    def test_what_torch_and_others_load_is_the_same(self, sample: Sample, tmp_path: Path) -> None:
        """Of what it is exported to, in each format, by the format's own library."""
        wanted = dict(sample.arrays)
        for to_format, loaded in loading.exported(sample.place, tmp_path).items():
            groups = ("model/", "optimizer/") if to_format.startswith("all of") else ("model/",)
            there = {name for name in wanted if name.startswith(groups)}
            assert set(loaded) == there, to_format
            for name in there:
                assert same(loaded[name], wanted[name]), (to_format, name)


class ForeignContract(BitForBit):
    """What else a format is to keep."""

    def test_a_slice_is_that_of_the_tensor(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            for name, wanted in sample.arrays.items():
                index: Any = (*(slice(n // 3, n // 3 + (n + 1) // 2) for n in wanted.shape), ...)
                assert same(checkpoint[name][index], wanted[index]), name

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        if sample.place.is_dir():
            store = CountingStore(ckptkit.open_store(sample.place))
            ckptkit.open(store).close()
            assert not store.operations["read_into"]

    def test_another_process_opens_the_same(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            packed = pickle.dumps(checkpoint)
        with pickle.loads(packed) as again:
            name = next(iter(sample.arrays))
            assert same(again[name][...], sample.arrays[name])

    def test_no_torch_and_no_pickle_is_needed(
        self, sample: Sample, read_plainly: Callable[[Path], str]
    ) -> None:
        assert read_plainly(sample.place) == "read"

    def test_a_file_that_was_cut_short_is_named(self, sample: Sample, tmp_path: Path) -> None:
        for part in sample.parts:
            copied = tmp_path / part.replace("/", "-")
            if sample.place.is_dir():
                shutil.copytree(sample.place, copied)
                place, file = copied, copied / part
            else:
                copied.mkdir()
                place = file = Path(shutil.copy(sample.place, copied))
            file.write_bytes(file.read_bytes().rstrip()[:-1])  # of a text, more than its line's end
            with pytest.raises(CkptkitError) as caught:
                read_all(place)
            assert part in str(caught.value)
            assert "Traceback" not in str(caught.value)

    def test_a_file_that_is_missing_is_an_error(self, sample: Sample, tmp_path: Path) -> None:
        if not sample.place.is_dir():
            return
        for part in sample.parts:
            copied = tmp_path / part.replace("/", "-")
            shutil.copytree(sample.place, copied)
            (copied / part).unlink()
            with pytest.raises(CkptkitError):
                read_all(copied, sample.arrays)
