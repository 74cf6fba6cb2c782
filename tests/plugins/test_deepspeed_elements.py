"""Elements that ranks of DeepSpeed have of a parameter, and the rows that a step has of it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from ckptkit.errors import UsageError
from ckptkit.plugins.deepspeed import save_checkpoint
from ckptkit.plugins.deepspeed_elements import ElementCut, HeldElements, exchange
from tests.live.pool import Pool

SHAPES = ((5, 3), (7,), (1,), (2, 2, 2), (1, 4), (0, 3), (4,))


def test_a_cut_says_who_has_which_elements() -> None:
    cut = ElementCut(size=7, each=4, before=3)  # …a bcde fg..
    assert [cut.of(rank) for rank in range(4)] == [(0, 1), (1, 5), (5, 7), (7, 7)]
    assert list(cut.ranks(0, 7)) == [0, 1, 2]
    assert list(cut.ranks(1, 5)) == [1]
    assert list(cut.ranks(3, 3)) == []


def there_and_back(each: int) -> tuple[list[npt.NDArray[Any]], bool]:
    """The rows of this rank of parameters that lie in one long row, and whether its elements came
    back from them.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    row = torch.arange(rank * each, (rank + 1) * each, dtype=torch.float32)
    shares, before = [], 0
    for shape in SHAPES:
        cut = ElementCut(torch.Size(shape).numel(), each, before)
        at = before + cut.of(rank)[0] - rank * each
        shares.append(HeldElements(shape, cut, row, at, rank, ranks))
        before += cut.size
    rows = [share.empty_rows(torch.float32) for share in shares]
    group = dist.group.WORLD
    exchange([share.to_rows(row, mine) for share, mine in zip(shares, rows, strict=True)], group)
    again = torch.full_like(row, -1.0)
    again[max(0, before - rank * each) :] = row[max(0, before - rank * each) :]  # padding
    exchange([s.from_rows(mine, again) for s, mine in zip(shares, rows, strict=True)], group)
    return [mine.numpy() for mine in rows], torch.equal(again, row)


def test_elements_become_rows_and_rows_elements(gloo: Pool) -> None:
    for each in (14, 20):
        found = gloo.run(3, there_and_back, each)
        assert all(is_back for _, is_back in found)
        begin = 0
        for number, shape in enumerate(SHAPES):
            size = torch.Size(shape).numel()
            whole = torch.arange(begin, begin + size, dtype=torch.float32).view(shape)
            assert torch.equal(torch.cat([torch.from_numpy(it[number]) for it, _ in found]), whole)
            begin += size


def test_without_deepspeed_the_extra_is_named() -> None:
    with pytest.raises(UsageError, match="needs deepspeed, which is not installed") as caught:
        save_checkpoint(object(), "runs/none")
    assert caught.value.hint == "pip install 'ckptkit[deepspeed]'"
