"""Eight bits for an element: what they can say, and what they must not hide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.parallel.optimizers.methods import (
    BLOCK,
    BlockRun,
    decoded,
    encoded,
    runs_of,
    shared_out,
)

SIZES = st.lists(st.integers(0, 3 * BLOCK), max_size=6)


def there_and_back(values: torch.Tensor) -> torch.Tensor:
    runs = runs_of([values.numel()])
    data = encoded(values, runs)
    assert data.numel() == sum(run.nbytes for run in runs)
    return decoded(data, runs)


@given(SIZES, st.integers(1, 5))
def test_every_block_has_one_rank_and_none_has_elements_of_two_tensors(
    sizes: list[int], ranks: int
) -> None:
    shares = shared_out(runs_of(sizes), ranks)
    assert len(shares) == ranks
    lengths = [run.length for runs in shares for run in runs for _ in range(run.count)]
    for size in sizes:
        left = size
        while left:
            length = lengths.pop(0)
            assert length <= min(left, BLOCK)
            left -= length
    assert not lengths


def test_the_shares_of_ranks_are_about_as_large() -> None:
    shares = shared_out(runs_of([100 * BLOCK, 7, 60 * BLOCK + 1]), 4)
    counts = [sum(run.numel for run in runs) for runs in shares]
    assert max(counts) - min(counts) <= 2 * BLOCK


def test_an_element_is_off_by_half_a_step_of_its_block_at_most() -> None:
    values = torch.randn(5 * BLOCK + 3) * torch.logspace(-6, 6, 5 * BLOCK + 3)
    found = there_and_back(values)
    for mine, theirs in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        assert (mine - theirs).abs().max() <= mine.abs().max() / 127 * 0.501


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_block_and_nowhere_else(bad: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    found = there_and_back(values)
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert torch.equal(found[2 * BLOCK :], values[2 * BLOCK :])


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    assert torch.equal(there_and_back(torch.zeros(BLOCK + 1)), torch.zeros(BLOCK + 1))
    tiny = torch.full((BLOCK,), 1e-44)
    tiny[0] = 1e-40
    assert there_and_back(tiny).isfinite().all()
    huge = torch.full((BLOCK,), 3e38)
    assert there_and_back(huge).isfinite().all()


def test_nothing_takes_no_bytes() -> None:
    assert encoded(torch.empty(0), []).numel() == 0
    assert decoded(torch.empty(0, dtype=torch.uint8), []).numel() == 0
    assert shared_out([], 2) == [[], []]
    assert runs_of([0]) == []
    assert runs_of([BLOCK]) == [BlockRun(1, BLOCK)]
