"""How batches are shared out, seen without any process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.parallel.strategies.options import share

ENTRIES = torch.arange(4)


@pytest.mark.parametrize(
    "beside",
    [["a", "b", "c", "d"], np.zeros(4), np.zeros((4, 2)), {"names": [1, 2, 3, 4]}, ([[0]] * 4,)],
    ids=str,
)
def test_what_goes_with_the_entries_and_cannot_be_cut_is_refused(beside: Any) -> None:
    with pytest.raises(UsageError, match="only tensors are cut"):
        share((ENTRIES, beside), 0, 2)
    assert share((ENTRIES, beside), 0, 1)[1] is beside


@pytest.mark.parametrize(
    "beside", [3, "abcd", None, (1, 2, 3, 4), [1, 2], np.float32(1), np.zeros(()), np.zeros(3), {}]
)
def test_other_values_go_to_all_replicas_whole(beside: Any) -> None:
    tensor, other = share((ENTRIES, beside), 1, 2)
    assert tensor.tolist() == [2, 3]
    assert np.array_equal(other, beside)


def test_lists_of_tensors_are_cut_one_by_one() -> None:
    inputs, named = share(([ENTRIES, ENTRIES * 2, ENTRIES, ENTRIES], {"mask": ENTRIES}), 1, 2)
    assert [tensor.tolist() for tensor in inputs] == [[2, 3], [4, 6], [2, 3], [2, 3]]
    assert named["mask"].tolist() == [2, 3]
