"""Buffers: where they lie in memory, and when they are used again."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import UsageError
from ckptkit.storage import BufferPool, default_pool
from ckptkit.storage.base import buffers
from ckptkit.storage.base.buffers import PAGE, address_of, copy_elements


@given(st.integers(1, 3 << 20), st.integers(0, 1 << 40))
def test_a_buffer_has_its_size_and_lies_where_it_was_asked_to(size: int, offset: int) -> None:
    with BufferPool().take(size, congruent_to=offset) as view:
        assert view.nbytes == size
        assert address_of(view) % PAGE == offset % PAGE
        view[0] = view[-1] = 1


def test_a_buffer_given_back_is_used_again() -> None:
    pool = BufferPool()
    first = pool.take(3 * PAGE)
    address = address_of(first.view)
    first.give_back()
    assert pool.kept_bytes == 3 * PAGE
    with pool.take(3 * PAGE) as view:
        assert address_of(view) == address
        assert pool.kept_bytes == 0
        with pool.take(3 * PAGE) as other:
            assert address_of(other) != address


@pytest.mark.parametrize("size", [2 << 20, (2 << 20) + 1, (4 << 20) + 2 * PAGE, 33 << 20])
def test_large_memory_is_whole_huge_pages(size: int) -> None:
    pool = BufferPool()
    with pool.take(size, congruent_to=512) as view:
        view[-1] = 1
    assert not pool.kept_bytes % (2 << 20)
    assert size + 512 <= pool.kept_bytes < size + (4 << 20)


def test_a_system_without_huge_pages_lends_large_memory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            raise OSError(errno.EINVAL, f"no such advice: {option}")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    with BufferPool().take(8 << 20) as view:
        view[-1] = 1


def test_giving_back_twice_lends_it_once() -> None:
    pool = BufferPool()
    buffer = pool.take(PAGE)
    buffer.give_back()
    buffer.give_back()
    assert pool.kept_bytes == PAGE


def test_a_view_cannot_be_used_after_it_was_given_back() -> None:
    buffer = BufferPool().take(PAGE)
    view = buffer.view
    buffer.give_back()
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


@pytest.mark.parametrize("look", [np.asarray, lambda view: view[:10], memoryview])
def test_memory_that_something_still_shows_is_not_lent_again(
    look: Callable[[memoryview], memoryview],
) -> None:
    pool = BufferPool()
    buffer = pool.take(PAGE)
    shown = look(buffer.view)
    shown[0] = 7
    buffer.give_back()
    assert pool.kept_bytes == 0
    assert shown[0] == 7


def test_a_pool_keeps_no_more_than_its_limit_and_lets_the_oldest_go() -> None:
    pool = BufferPool(limit=4 * PAGE)
    buffers = [pool.take(size * PAGE) for size in (1, 2, 3, 5)]
    for buffer in buffers:
        buffer.give_back()
    assert pool.kept_bytes == 3 * PAGE
    pool.clear()
    assert pool.kept_bytes == 0


def test_an_empty_buffer_is_a_buffer() -> None:
    with BufferPool().take(0) as view:
        assert view.nbytes == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError):
        BufferPool().take(-1)


def test_there_is_one_pool_for_the_process() -> None:
    assert default_pool() is default_pool()


VIEWS: dict[str, Callable[[npt.NDArray[np.int32]], npt.NDArray[np.int32]]] = {
    "whole": lambda a: a,
    "rows with gaps": lambda a: a[:, 1:4],
    "every other column": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1, ::-1],
    "rows backwards": lambda a: a[::-1, 2:5],
    "transposed": lambda a: a.T,
    "the same row again": lambda a: np.broadcast_to(a[:1], (700, 7)),
    "the same element again": lambda a: np.broadcast_to(a[:, :1], (700, 7)),
    "three dims": lambda a: a.reshape(70, 10, 7)[:, 2:, 1:],
    "no columns": lambda a: a[:, :0],
    "no rows": lambda a: a[:0],
    "one element": lambda a: a[0, 0, ...],
}


@pytest.mark.parametrize("long_row", [4, 16 << 10])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", VIEWS)
def test_elements_are_copied_between_memory_of_any_order(
    kind: str, order: Literal["C", "F"], long_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_LONG_ROW", long_row)
    source = VIEWS[kind](np.arange(4900, dtype=np.int32).reshape(700, 7))
    target = np.full(source.shape, -1, np.int32, order=order)
    copy_elements(source, target)
    assert np.array_equal(target, source)
    spread = np.full(
        (*source.shape[:-1], 2 * source.shape[-1]) if source.ndim else (), -1, np.int32
    )
    beside = spread[..., : source.shape[-1]] if source.ndim else spread
    copy_elements(source, beside)
    assert np.array_equal(beside, source)
    assert np.count_nonzero(spread == -1) == spread.size - source.size
