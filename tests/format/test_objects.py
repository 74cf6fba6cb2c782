from __future__ import annotations

import dataclasses

import pytest

from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.objects import PerRank, Replicated, Sum


@pytest.mark.parametrize("kind", [Replicated, PerRank, Sum])
def test_a_wrapper_only_carries_its_value(kind: type) -> None:
    wrapped = kind(3)
    assert wrapped.value == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrapped.value = 4


@pytest.mark.parametrize("value", [None, True, "3", b"3", [3], (3,), {"a": 3}])
def test_only_numbers_are_summed(value: object) -> None:
    with pytest.raises(UnsupportedTypeError, match="PerRank"):
        Sum(value)
