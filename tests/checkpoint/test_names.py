"""Names and shapes that `add` refuses, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Writer
from ckptkit.errors import CkptkitError, InvalidNameError, LayoutError, UsageError
from ckptkit.format.names import join
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import save_by

BAD_NAMES = [
    "",
    "/",
    "..",
    ".",
    "a/../b",
    "a/./b",
    "/etc/passwd",
    "a/",
    "a//b",
    "a\0b",
    "a b",
    "\\",
    "C:\\x",
    "ä",
    "\ud800",
    "%2e",
    "%41",
    "__init__",
    ".ckptkit",
    "a/zarr.json",
    "x" * 10_000,
    "y" * 241,
    "/".join("x" * 33),
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name[:20]))
def test_a_name_that_the_format_cannot_hold_is_refused(name: str) -> None:
    writer = Writer(MemoryStore(), step=1)
    adds: list[Callable[[], None]] = [
        lambda: writer.add(name, np.zeros(3)),
        lambda: writer.add_alias(name, "a"),
    ]
    for add in adds:
        with pytest.raises(InvalidNameError) as caught:
            add()
        assert caught.value.has_value
        assert caught.value.hint
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "ä ö", "__x", "zarr.json", ".ckptkit", "%"])
def test_joined_names_hold_any_text(name: str) -> None:
    store = MemoryStore()
    with Writer(store, step=1) as writer:
        writer.add(join("model", name), np.arange(3))
    with ckptkit.open(store) as checkpoint:
        assert checkpoint[join("model", name)][...].tolist() == [0, 1, 2]
        group: Any = checkpoint.zarr
        assert group[join("model", name)][...].tolist() == [0, 1, 2]
    assert ckptkit.verify(store) == []


def test_a_name_is_added_once() -> None:
    writer = Writer(MemoryStore(), step=1)
    writer.add("a", np.zeros(3))
    writer.add_alias("b", "a")
    for name in ("a", "b"):
        with pytest.raises(InvalidNameError):
            writer.add(name, np.zeros(3))
        with pytest.raises(InvalidNameError):
            writer.add_alias(name, "a")


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a")])
def test_an_array_below_an_array_is_refused(names: tuple[str, str]) -> None:
    store = MemoryStore()

    def fill(writer: Writer) -> None:
        for name in names:
            writer.add(name, np.zeros(3))

    with pytest.raises(CkptkitError) as caught:
        save_by(store, fill)
    assert names[0] in str(caught.value)
    assert store.list() == []


def _array(name: str) -> Callable[[Writer], None]:
    def fill(writer: Writer) -> None:
        writer.add(name, np.zeros(3), placements={"pp": f"stage({writer.rank})"})

    return fill


def _alias(name: str) -> Callable[[Writer], None]:
    def fill(writer: Writer) -> None:
        writer.add("z", np.zeros(3), placements={"pp": f"stage({writer.rank})"})
        writer.add_alias(name, "z")

    return fill


@pytest.mark.parametrize(
    "adds",
    [
        (_array("a"), _array("a/b")),
        (_array("a/b"), _array("a")),
        (_array("a"), _alias("a")),
        (_array("a/b"), _alias("a")),
    ],
    ids=["below", "above", "the same", "an alias above"],
)
def test_names_of_two_ranks_that_clash_are_refused(
    adds: tuple[Callable[[Writer], None], ...],
) -> None:
    store = MemoryStore()
    with pytest.raises(CkptkitError):
        save_by(store, lambda writer: adds[writer.rank](writer), strategy="pp:2")
    assert store.list() == []


ABSURD: list[Any] = [
    (-1,),
    (3, -1),
    (1 << 62,),
    (1 << 63,),
    (1 << 70,),
    (1 << 40, 1 << 40),
    (0, 1 << 63),
    (1,) * 33,
]


@pytest.mark.parametrize("shape", ABSURD, ids=lambda shape: str(shape)[:30])
def test_an_absurd_shape_is_refused_at_once(shape: Any) -> None:
    writer = Writer(MemoryStore(), step=1)
    with pytest.raises(UsageError) as caught:
        writer.add("w", np.zeros(3, "f4"), shape=shape)
    assert caught.value.has_value


@pytest.mark.parametrize("shape", [(2.5,), ("3",), (None,), "3", 3])
def test_a_shape_is_made_of_integers(shape: Any) -> None:
    writer = Writer(MemoryStore(), step=1)
    with pytest.raises(TypeError):
        writer.add("w", np.zeros(3, "f4"), shape=shape)


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 40, 1 << 40), (1,) * 33, (1 << 61, 4)])
def test_an_absurd_shape_is_refused_of_a_rank_that_holds_nothing(shape: Any) -> None:
    store = MemoryStore()

    def fill(writer: Writer) -> None:
        placed = {"zero1": f"owner({1 - writer.rank})"}
        writer.add("w", None, shape=shape, dtype="float32", placements=placed)

    with pytest.raises(CkptkitError):
        save_by(store, fill, strategy="zero1:2")
    assert store.list() == []


@pytest.mark.parametrize(
    "options",
    [
        {"placements": {"tp": "shard(0)"}},
        {"placements": {"fsdp": "shard(1)"}},
        {"placements": {"fsdp": "shard(0, blocks=[2,2])"}},
        {"placements": {"fsdp": "owner(1)"}},
        {"placements": {"fsdp": "cut"}},
        {"role": "parameter"},
        {"of": "a/../b"},
        {"dtype": "float7"},
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    writer = Writer(MemoryStore(), step=1, strategy="fsdp:1")
    with pytest.raises(UsageError):
        writer.add("w", np.zeros(3), **options)


@pytest.mark.parametrize("step", [-1, 1 << 63, 1.0, "1", None, True])
def test_a_step_is_a_number(step: Any) -> None:
    with pytest.raises(UsageError):
        Writer(MemoryStore(), step=step)


def test_the_greatest_step_is_a_step() -> None:
    store = MemoryStore()
    with Writer(store, step=(1 << 63) - 1) as writer:
        writer.add("w", np.zeros(3))
    assert ckptkit.Run(store).latest() == (1 << 63) - 1
    assert ckptkit.verify(store) == []


def test_the_array_of_an_absurd_shape_is_named() -> None:
    writer = Writer(MemoryStore(), step=1)
    with pytest.raises(LayoutError) as caught:
        writer.add("w", np.zeros(3), shape=(-1,))
    assert caught.value.where == "w"
