"""A checkpoint of version 1 is read by every later version."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import ckptkit
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.run.mirror import copy_step
from ckptkit.errors import FormatError
from ckptkit.format.encoding import dumps
from ckptkit.storage import MemoryStore, open_store
from tests.old_checkpoints import write_v1 as written

STEP = written.FOLDER / f"step-{written.STEP:010d}"
CHECKPOINT = ckptkit.open(written.FOLDER)
PLAIN = [name for name, array in CHECKPOINT.arrays.items() if array.grid.is_regular]


def same(found: Any, expected: Any) -> bool:
    return bool(
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


def test_every_byte_is_as_it_was_written() -> None:
    assert ckptkit.verify(written.FOLDER) == []
    assert ckptkit.verify(STEP) == []


def test_every_byte_can_be_accounted_for_when_it_is_copied() -> None:
    there = MemoryStore()
    copied = copy_step(open_store(written.FOLDER), there, written.STEP, OneRank())
    assert copied.nbytes == sum(pack.size for pack in CHECKPOINT.manifest.packs)
    assert ckptkit.verify(there) == []


def test_it_holds_every_form_that_version_1_has() -> None:
    assert (STEP / "data" / written.SAVE_ID / "groups.zip").is_file()
    assert len(PLAIN) < len(CHECKPOINT.arrays), "one grid is rectilinear"
    assert {item.semantics for item in CHECKPOINT.manifest.objects} == {
        "replicated",
        "per_rank",
        "sum",
    }
    assert sum(path.stat().st_size for path in STEP.rglob("*") if path.is_file()) < 100_000


def test_the_step_says_what_it_is() -> None:
    assert ckptkit.Run(written.FOLDER).steps()
    assert CHECKPOINT.step == written.STEP
    assert str(CHECKPOINT.strategy) == written.STRATEGY
    assert CHECKPOINT.save_id == written.SAVE_ID
    assert CHECKPOINT.time == written.TIME
    assert dumps(dict(CHECKPOINT.details)) == dumps(written.DETAILS)
    assert set(CHECKPOINT.arrays) == {*written.ARRAYS, *written.ALIASES}


@pytest.mark.parametrize("name", written.ARRAYS)
def test_an_array_has_its_content(name: str) -> None:
    tensor, array = written.ARRAYS[name], CHECKPOINT[name]
    assert same(array.read(), tensor.whole)
    assert (array.role, array.info.of) == (tensor.role, tensor.of)
    for rank in range(4):
        part = written.part_of(tensor, rank)
        assert array.part(rank).is_empty == (part is None)
        assert part is None or array.part(rank).shape == part.shape
    if array.shape and array.shape[0] > 3:
        assert same(array[1:-1], tensor.whole[1:-1])


@pytest.mark.parametrize(("name", "alias_of"), written.ALIASES.items())
def test_an_alias_is_the_array_itself(name: str, alias_of: str) -> None:
    assert CHECKPOINT[name].alias_of == alias_of
    assert same(CHECKPOINT[name].read(), written.ARRAYS[alias_of].whole)


def test_objects_have_their_values() -> None:
    assert dumps(CHECKPOINT.objects["schedule"]) == dumps(written.SCHEDULE)
    assert CHECKPOINT.objects["rng"] == written.RANDOM_STATES
    assert CHECKPOINT.objects["tokens"] == sum(written.TOKENS)


@pytest.mark.parametrize("name", sorted(set(PLAIN) - set(written.ALIASES)))
def test_unzipped_it_is_a_plain_zarr_hierarchy(tmp_path: Path, name: str) -> None:
    for pack in (STEP / "data" / written.SAVE_ID).iterdir():
        with zipfile.ZipFile(pack) as archive:
            assert archive.testzip() is None
            archive.extractall(tmp_path)
    found = zarr.open_group(tmp_path, mode="r")[name]
    assert isinstance(found, zarr.Array)
    assert same(np.asarray(found[...]), written.ARRAYS[name].whole)


def test_its_manifest_can_be_made_again_to_the_byte(tmp_path: Path) -> None:
    copy = tmp_path / STEP.name
    for path in STEP.rglob("*.zip"):
        target = copy / path.relative_to(STEP)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    with pytest.raises((FormatError, FileNotFoundError)):
        ckptkit.open(copy)
    ckptkit.rebuild(copy)
    assert (copy / "manifest.msgpack").read_bytes() == (STEP / "manifest.msgpack").read_bytes()
