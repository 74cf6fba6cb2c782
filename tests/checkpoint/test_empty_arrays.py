"""Arrays without elements, however large their other dims: nothing walks along those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Writer
from ckptkit.errors import FormatError, LayoutError
from ckptkit.model import Box, Grid
from tests.checkpoint.saving import save_by
from tests.cli.programs import ckpt, document
from tests.format.samples import edited, plain, sealed

SHAPES = {
    "model/a": (0, 2**53),
    "model/b": (2**30, 0, 2**28),
    "model/c": (2**59, 0),
    "model/d": (2**20, 2**20, 0, 2**20),
    "model/e": (0,),
}


def fill(writer: Writer) -> None:
    for number, (name, shape) in enumerate(SHAPES.items()):
        cut = {"fsdp": f"shard({number % len(shape)})"}
        writer.add(name, shape=shape, dtype="float32" if number else "int8", placements=cut)
    writer.add("model/full", np.arange(4.0))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save_by(tmp_path / "run", fill, strategy="fsdp:3")
    return tmp_path / "run" / "step-0000000001"


@pytest.fixture
def hostile(step: Path) -> Path:
    """A step whose manifest cuts empty arrays as finely as a grid allows."""
    manifest = step / "manifest.msgpack"
    document = plain(manifest.read_bytes())
    for number, chunk in enumerate([[1, 2**20], [1, 1, 2**20], [2**20, 1], [1, 2**10, 1, 2**10]]):
        path = f"arrays.{number}.grid.chunk_shape"
        document = edited(document, path, chunk)
    manifest.write_bytes(sealed(document))
    return step


@pytest.mark.parametrize("which", ["step", "hostile"])
def test_every_way_to_look_at_them_returns(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    step = request.getfixturevalue(which)
    with ckptkit.open(step) as checkpoint:
        assert {n: a.shape for n, a in checkpoint.arrays.items() if not a.info.nbytes} == SHAPES
        for name, shape in SHAPES.items():
            assert checkpoint.read(name).shape == shape
            assert checkpoint[name][..., :1].size == 0
            assert checkpoint.read(name, verify=False).shape == shape
            zarr: Any = checkpoint.zarr[name]
            assert zarr[...].shape == shape
            assert checkpoint[name].part(2).is_empty
    assert document("show", step)["arrays"][0]["shape"] == [0, 2**53]
    assert ckpt("show", step, "--rank", "1").exit_code == 0
    assert ckpt("verify", step).exit_code == (0 if which == "step" else 3)
    assert ckpt("unpack", step, tmp_path / "plain").exit_code == 0
    assert ckptkit.diff(step, step).same
    for to in ("single", "fsdp:8", "fsdp:2,tp:2"):
        target = tmp_path / to
        done = ckpt("reshard", "--to", to, "--replicate-unknown", step, target)
        assert done.exit_code == 0, done.output
        assert ckptkit.digest(target).step == ckptkit.digest(step).step
        assert ckptkit.verify(target) == []


LARGE = [(2**62, 0, 2**62), (0, 2**62), (2**31, 2**31, 0)]


@pytest.mark.parametrize("shape", LARGE)
def test_dims_that_no_memory_can_have_are_refused(shape: tuple[int, ...], step: Path) -> None:
    writer = Writer(step.parent, step=2)
    with pytest.raises(LayoutError, match="2\\*\\*63 bytes or more") as refused:
        writer.add("w", shape=shape, dtype="float32")
    assert refused.value.where == "w"
    manifest = step / "manifest.msgpack"
    changed = edited(plain(manifest.read_bytes()), "arrays.1.shape", list(shape))
    chunk = [max(1, n) for n in shape]
    manifest.write_bytes(
        sealed(edited(changed, "arrays.1.grid", {"kind": "regular", "chunk_shape": chunk}))
    )
    with pytest.raises(FormatError, match="2\\*\\*63 bytes or more") as unread:
        ckptkit.open(step)
    assert unread.value.where.endswith("manifest.msgpack: arrays.1.shape")


@pytest.mark.parametrize("shape", [(0, 2**53), (2**30, 0, 2**30)])
def test_a_grid_of_an_empty_array_has_bounds(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="2\\*\\*40"):
        Grid.regular(shape, (1,) * len(shape))


def test_an_empty_box_touches_no_chunk_of_any_dim() -> None:
    grid = Grid.regular((2**20, 2**20), (1, 1))
    assert grid.span(Box((0, 5), (2**20, 0))) == (range(0), range(0))
    assert grid.span(Box((0, 5), (1, 2))) == (range(1), range(5, 7))
