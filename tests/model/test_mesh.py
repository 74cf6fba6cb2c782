from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import StrategyError
from ckptkit.model import Axis, Mesh

meshes = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(tuple(Axis(f"a{i}", "ddp", size) for i, size in enumerate(sizes)))
)


@given(meshes)
def test_ranks_are_numbered_row_major(mesh: Mesh) -> None:
    coords = [mesh.coords(rank) for rank in range(mesh.world_size)]
    assert coords == sorted(set(coords))
    assert [mesh.rank(at) for at in coords] == list(range(mesh.world_size))


def test_the_first_axis_is_the_slowest() -> None:
    mesh = Mesh((Axis("ddp", "ddp", 2), Axis("tp", "tp", 3)))
    assert mesh.coords(4) == (1, 1)
    assert mesh.sizes == (2, 3)


def test_no_axes_are_one_rank() -> None:
    assert Mesh().world_size == 1
    assert Mesh().coords(0) == ()
    assert Mesh().rank(()) == 0


@pytest.mark.parametrize(
    ("name", "kind", "size", "message"),
    [
        ("tp", "tpp", 2, "did you mean tp"),
        ("tp", "tp", 0, "integer from 1"),
        ("tp", "tp", True, "integer from 1"),
        ("tp", "tp", 2**24 + 1, "integer from 1"),
        ("TP", "tp", 2, "not a name"),
        ("", "tp", 2, "not a name"),
        ("a" * 65, "tp", 2, "not a name"),
    ],
)
def test_a_wrong_axis_cannot_be_made(name: str, kind: str, size: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Axis(name, kind, size)


def test_a_mesh_has_bounds() -> None:
    with pytest.raises(StrategyError, match="twice"):
        Mesh((Axis("tp", "tp", 2), Axis("tp", "tp", 3)))
    with pytest.raises(StrategyError, match="2\\*\\*24"):
        Mesh((Axis("a", "ddp", 2**13), Axis("b", "tp", 2**12)))
    with pytest.raises(StrategyError, match="axes"):
        Mesh(tuple(Axis(f"a{i}", "ddp", 1) for i in range(33)))


def test_places_off_the_mesh_are_refused() -> None:
    mesh = Mesh((Axis("tp", "tp", 2),))
    for call in (
        lambda: mesh.coords(2),
        lambda: mesh.coords(-1),
        lambda: mesh.rank((2,)),
        lambda: mesh.rank(()),
    ):
        with pytest.raises(StrategyError):
            call()
