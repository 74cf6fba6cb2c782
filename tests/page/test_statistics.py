from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.read.stream import LEAST_MEMORY, Limits
from ckptkit.model import DTYPES
from ckptkit.page import OCTAVES, statistics_of
from tests.checkpoint.saving import Tensor, random_values, save


@pytest.mark.parametrize("name", DTYPES)
def test_statistics_are_those_of_numpy(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    whole = random_values((300, 70), name)  # NaNs, infinities and denormals among them
    whole[5:9] = np.zeros((), dtype.numpy)
    save(tmp_path, {"model/w": Tensor(whole, {"fsdp": "shard(0)"})}, strategy="fsdp:2")
    with ckptkit.open(tmp_path) as checkpoint:
        (row,) = statistics_of(checkpoint, Limits.of(LEAST_MEMORY, 2))
    least, most, mean, zeros, nans, infinite, power, bars = row
    parts = whole.reshape(-1)
    if dtype.numpy.names or dtype.numpy.kind == "c":  # both parts are numbers
        parts = parts.view({2: np.float16, 4: np.float32, 8: np.float64}[dtype.itemsize // 2])
    with np.errstate(invalid="ignore"):
        numbers = parts.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    assert (least, most) == (finite.min(), finite.max())
    assert mean is None or math.isclose(mean, finite.mean(), rel_tol=1e-6, abs_tol=1e-6)
    assert zeros == int((finite == 0).sum())
    assert (nans, infinite) == (int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum()))
    # No number reaches the power of two; the largest one reaches the half of it.
    assert math.ldexp(0.5, power) <= np.abs(finite).max() < math.ldexp(1, min(power, 1023)) * 2
    assert len(bars) <= 2 * OCTAVES + 1
    near = np.abs(finite) < math.ldexp(1, power - len(bars) // 2)
    largest = max(bars)
    assert largest == 999
    top = np.abs(finite) >= math.ldexp(0.5, power)
    counts = [int((top & (finite < 0)).sum()), int(near.sum()), int((top & (finite > 0)).sum())]
    shown = [bars[0], bars[len(bars) // 2], bars[-1]]
    at = int(np.argmax(counts))
    assert [count * shown[at] // max(1, counts[at]) for count in counts] <= [
        each + 1 for each in shown
    ]


def test_nothing_and_not_a_number_have_no_least(tmp_path: Path) -> None:
    state = {
        "model/nan": Tensor(np.full(3, np.nan, np.float32)),
        "model/none": Tensor(np.zeros((0, 2), np.float32)),
        "model/zero": Tensor(np.zeros((), np.int8)),
    }
    save(tmp_path, state)
    with ckptkit.open(tmp_path) as checkpoint:
        nan, none, zero = statistics_of(checkpoint, Limits.of(LEAST_MEMORY, None))
    assert nan[:6] == [None, None, None, 0, 3, 0]
    assert none[:6] == [None, None, None, 0, 0, 0]
    assert zero == [0, 0, 0, 1, 0, 0, 0, []]
