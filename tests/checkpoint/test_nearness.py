from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ckptkit.checkpoint.run.diff import Apart, Tolerance, apart, is_near
from ckptkit.errors import UsageError
from ckptkit.model import DTYPES, DType

INF, NAN = math.inf, math.nan


def compared(dtype: str, a: Any, b: Any, atol: float = 0.0, rtol: float = 0.0) -> Apart | None:
    known = DTYPES[dtype]
    ours, theirs = (np.array(side, known.numpy).view(known.bits) for side in (a, b))
    return apart(known, ours, theirs, Tolerance(atol, rtol))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 5, 32_767, 32_768, 99_998])
def test_one_flipped_bit_of_any_type_is_found(dtype: str, at: int) -> None:
    known = DType.of(dtype)
    a = np.zeros(99_999 * known.itemsize, np.uint8)
    b = a.copy()
    b[at * known.itemsize] ^= 1
    found = apart(known, a.view(known.bits), b.view(known.bits), Tolerance(), start=1000)
    assert found is not None
    assert (found.count, found.first) == (1, 1000 + at)
    assert apart(known, a.view(known.bits), a.view(known.bits).copy(), Tolerance()) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex128"])
def test_without_a_tolerance_bits_are_compared(dtype: str) -> None:
    assert compared(dtype, [NAN, INF, 0.0], [NAN, INF, 0.0]) is None
    assert compared(dtype, [1.0, 0.0], [1.0, -0.0]) == Apart(1, 1, 0.0)
    assert compared(dtype, [NAN, 1.0], [1.0, NAN]) == Apart(2, 0, None)
    assert compared(dtype, [INF, 1.0, 2.0], [-INF, 1.0, NAN]) == Apart(2, 0, INF)
    known = DTYPES[dtype]
    nan = np.array([NAN], known.numpy)
    other = nan.copy()
    other.view(np.uint8)[0] ^= 1
    assert apart(known, nan.view(known.bits), other.view(known.bits), Tolerance()) == Apart(
        1, 0, None
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_with_a_tolerance_numbers_are_compared(dtype: str) -> None:
    assert compared(dtype, [NAN, INF, 0.0, 1.0], [NAN, INF, -0.0, 1.5], atol=0.5) is None
    assert compared(dtype, [1.0, 3.0], [1.5, 2.0], atol=0.5) == Apart(1, 1, 1.0)
    assert compared(dtype, [2.0, 4.0], [4.0, 2.0], rtol=0.5) == Apart(1, 1, 2.0)
    # Much of infinity is allowed, but nothing is near to it.
    assert compared(dtype, [1.0, INF, NAN], [INF, -INF, 1.0], atol=9, rtol=9) == Apart(3, 0, INF)


def test_a_tolerance_is_exact_at_its_edge() -> None:
    assert compared("float64", [1.0], [1.0 + 2**-20], atol=2**-20) is None
    found = compared("float64", [1.0], [1.0 + 2**-20], atol=np.nextafter(2**-20, 0))
    assert found == Apart(1, 0, 2**-20)


def test_integers_neither_wrap_nor_round() -> None:
    least, most, top = -(2**63), 2**63 - 1, 2**64 - 1
    assert compared("int64", [least, 0], [most, 0]) == Apart(1, 0, 2**64 - 1)
    assert compared("uint64", [0, top], [top, top - 1]) == Apart(2, 0, top)
    assert compared("uint64", [top], [top - 2], atol=1) == Apart(1, 0, 2)
    assert compared("uint64", [top], [top - 1], atol=1) is None
    assert compared("uint64", [0], [top], atol=1e30) is None
    assert compared("int64", [least], [most], rtol=1) == Apart(1, 0, 2**64 - 1)
    assert compared("int64", [least], [most], rtol=3) is None
    assert compared("int8", [-128, 5], [127, 4], atol=1.9) == Apart(1, 0, 255)
    assert compared("uint8", [0], [255]) == Apart(1, 0, 255)
    assert compared("bool", [True, False], [False, False]) == Apart(1, 0, 1)
    assert compared("bool", [True], [False], atol=1) is None


def test_complex_numbers_of_two_halves_are_numbers() -> None:
    a, b = [(1.0, 2.0), (0.0, 0.0)], [(1.0, 2.0), (3.0, 4.0)]
    assert compared("complex_float16", a, b) == Apart(1, 1, 5.0)
    assert compared("complex_float16", a, b, atol=5) is None


def test_8_bit_floats_are_numbers() -> None:
    assert compared("float8_e4m3fn", [1.0, 448.0], [1.125, 448.0]) == Apart(1, 0, 0.125)
    assert compared("float8_e4m3fn", [1.0], [1.125], rtol=0.12) is None


@pytest.mark.parametrize("bad", [-1.0, NAN, INF])
def test_a_tolerance_is_a_number(bad: float) -> None:
    with pytest.raises(UsageError, match="atol"):
        Tolerance(bad)
    with pytest.raises(UsageError, match="rtol"):
        Tolerance(0.0, bad)


def test_values_of_objects_are_near_in_every_part() -> None:
    near = Tolerance(0.1)
    a = {"x": [1.0, (2.0,)], "n": 3, "s": "text", "v": np.array([1.0, 2.0]), "o": None}
    assert is_near(a, {**a, "x": [1.05, (2.05,)], "v": np.array([1.0, 2.05])}, near)
    for other in (
        {**a, "x": [1.2, (2.0,)]},
        {**a, "x": [1.0]},
        {**a, "n": 4},
        {**a, "n": 3.0},
        {**a, "s": "other"},
        {**a, "v": np.array([1.0])},
        {**a, "v": np.array([1.0, 2.0], "float32")},
        {**a, "more": 1},
    ):
        assert not is_near(a, other, near)
    assert not is_near(1.0, 1.0000001, Tolerance())
    assert is_near(np.float32(1), np.float32(1.01), near)
    assert not is_near(True, False, Tolerance(5.0))
