from __future__ import annotations

import datetime
import enum
import math
from collections import OrderedDict
from datetime import timedelta, timezone
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.encoding import MAX_DEPTH, canonical, check_leaf, dumps, unpack
from ckptkit.model import DTYPES, DType

EAST = timezone(timedelta(hours=5, minutes=45))


def again(value: object) -> Any:
    """Written and read."""
    return check_leaf(unpack(dumps(value), "leaf"), "leaf")


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (np.ndarray, np.generic)):
        return bool((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()))
    if isinstance(a, datetime.datetime):
        return bool(a == b and a.utcoffset() == b.utcoffset())
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        0.0,
        1.0,
        -0.0,
        math.inf,
        math.nan,
        5e-324,
        "",
        "text",
        "é\0\U0001f600",
        b"",
        b"\0\xff",
        [],
        (),
        {},
        [()],
        ([],),
        (1, (2, [3, (4,)])),
        {"a": 1, 1: "a", -5: None, 2**64 - 1: 0, "1": 0},
        {"z": 0, "a": 0},
        datetime.datetime(2026, 11, 21, 10, 15),  # noqa: DTZ001 — naive on purpose
        datetime.datetime(2026, 11, 21, 10, 15, 0, 1, tzinfo=datetime.UTC),
        datetime.datetime(1, 1, 1, tzinfo=EAST),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: object) -> None:
    assert same(again(value), value)
    assert same(again([value, {"x": value}]), [value, {"x": value}])


def test_the_sign_of_zero_is_kept() -> None:
    assert math.copysign(1, again(-0.0)) == -1


@given(st.integers() | st.integers(-(2**70), 2**70) | st.integers(1, 200).map(lambda n: -(2**n)))
def test_an_integer_of_any_size_comes_back(value: int) -> None:
    assert same(again(value), value)


@pytest.mark.parametrize("bits", [71, 72, 79, 80, 2000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_big_integer_takes_the_fewest_bytes(bits: int, sign: int) -> None:
    for value in (sign * 2**bits, sign * 2**bits - 1, sign * 2**bits + 1):
        length = next(n for n in range(1, 300) if -(2 ** (8 * n - 1)) <= value < 2 ** (8 * n - 1))
        assert dumps(value).endswith(b"\2" + value.to_bytes(length, "big", signed=True))


leaves = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(leaves)
def test_a_tree_comes_back_and_equal_trees_are_equal_bytes(value: object) -> None:
    found = again(value)
    assert same(found, value)
    assert dumps(found) == dumps(value)


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 1)])
def test_an_array_of_every_dtype_comes_back_to_the_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    raw = np.random.default_rng(1).bytes(math.prod(shape) * dtype.itemsize)
    if name == "bool":
        raw = bytes(b & 1 for b in raw)
    value = np.frombuffer(raw, dtype.numpy).reshape(shape)
    assert same(again(value), value)
    assert again(value).flags.writeable


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_scalar_of_every_dtype_comes_back_as_a_scalar(name: str) -> None:
    for value in np.frombuffer(bytes([1, 0] * 16), DTYPES[name].numpy):
        assert same(again(value), value)


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=4, max_side=4)), st.integers(0, 3))
def test_an_array_is_stored_in_c_order_whatever_its_strides(value: Any, way: int) -> None:
    turned = (value.T, value[::-1], value[..., ::2], np.asfortranarray(value))[way]
    assert same(again(turned), np.ascontiguousarray(turned))


def test_numbers_of_numpy_are_not_taken_for_those_of_python() -> None:
    for value in (np.float64(1), np.bool_(True), np.int64(1), ml_dtypes.bfloat16(1)):
        assert same(again(value), value)
        assert dumps(value) != dumps(value.item())


def test_an_ordered_dictionary_is_a_dictionary_in_its_order() -> None:
    assert same(again(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def nested(levels: int, wrap: Any, inner: object) -> object:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


WRAPS = [lambda v: [v], lambda v: (v,), lambda v: {"a": v}]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    "inner", [1, 2**70, np.float32(1), np.arange(3), datetime.datetime.now(tz=datetime.UTC)]
)
def test_what_is_deep_is_refused_by_the_writer_or_read_back(wrap: Any, inner: object) -> None:
    for levels in range(MAX_DEPTH - 3, MAX_DEPTH + 2):
        value = nested(levels, wrap, inner)
        if levels < MAX_DEPTH:
            assert same(again(value), value), levels
        else:
            with pytest.raises(UnsupportedTypeError, match="more than 32 levels"):
                dumps(value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    for made in (dumps, canonical):
        with pytest.raises(UnsupportedTypeError, match="contains itself"):
            made(tree)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {"b": object()}]}, "x.a[1].b"),
        ({"a": (0, {3})}, "x.a[1]"),
        ({"opt": {0: frozenset()}}, "x.opt.0"),
        ([1j], "x[0]"),
        ([bytearray(b"a")], "x[0]"),
        ([memoryview(b"a")], "x[0]"),
        ([range(3)], "x[0]"),
        ([Color.RED], "x[0]"),
        ([type("T", (tuple,), {})()], "x[0]"),
        ([type("D", (dict,), {})()], "x[0]"),
        ([datetime.date(2026, 1, 1)], "x[0]"),
        ([timedelta(1)], "x[0]"),
        ([len], "x[0]"),
        ([np.array([object()])], "x[0]"),
        ([np.array(["text"])], "x[0]"),
        ([np.datetime64("2026-01-01")], "x[0]"),
        ([np.arange(3, dtype=">i4")], "x[0]"),
        ([np.longdouble(1)], "x[0]"),
        ([DType.of("int8")], "x[0]"),
        ({"a": {1.5: 0}}, "x.a"),
        ({"a": {None: 0}}, "x.a"),
        ({"a": {True: 0}}, "x.a"),
        ({"a": {2**64: 0}}, "x.a"),
        ({"a": {(1,): 0}}, "x.a"),
        ({"a": "\ud800"}, "x.a"),
        ({"a": {"\ud800": 0}}, "x.a"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_the_format_has_no_type_for_is_refused_with_its_place(
    value: object, where: str
) -> None:
    with pytest.raises(UnsupportedTypeError) as error:
        dumps(value, "x")
    assert error.value.where == where


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with pytest.raises(UnsupportedTypeError):
        dumps(np.ma.masked_array([1, 2], [True, False]))
