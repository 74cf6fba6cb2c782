from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.errors import FormatError
from ckptkit.format.encoding import check_leaf, dumps, unpack
from tests.format.samples import extension


def read(data: bytes) -> Any:
    return check_leaf(unpack(data, "objects.0.value"), "objects.0.value")


def refuse(value: Any, problem: str = ".") -> None:
    """Packed as it is, the value gives a FormatError and nothing else."""
    data = value if isinstance(value, bytes) else msgpack.packb(value)
    with pytest.raises(FormatError, match=problem) as error:
        read(data)
    assert error.value.where == "objects.0.value"


codes = st.sampled_from([1, 2, 3, 4, 5, 0, 6])
hostile = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from(["float32", "bool", "torch.int8", "int4", "2026-01-01"])
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=2), inner, max_size=2)
        | st.tuples(codes, inner).map(lambda it: extension(*it))
        | st.tuples(codes, st.binary(max_size=9)).map(lambda it: msgpack.ExtType(abs(it[0]), it[1]))
    ),
)


@given(st.binary(max_size=64) | hostile.map(msgpack.packb))
@example(b"")
@example(b"\xc1")
@example(msgpack.packb(extension(4, ["zork", b"a"])))
def test_any_bytes_are_a_leaf_or_a_format_error(data: bytes) -> None:
    try:
        value = read(data)
    except FormatError:
        return
    assert read(dumps(value)) is value or dumps(read(dumps(value))) == dumps(value)


@given(st.binary(min_size=1, max_size=6), st.integers(0, 200))
def test_a_leaf_with_some_bytes_changed_is_a_leaf_or_a_format_error(noise: bytes, at: int) -> None:
    good = dumps({"a": [1, (2, 3.5), b"x" * 9], "n": 2**80, "t": {5: None}})
    at %= len(good)
    with suppress(FormatError):
        read(good[:at] + noise + good[at + len(noise) :])


def test_a_leaf_that_is_cut_off_or_goes_on_is_refused() -> None:
    good = dumps({"a": [1, (2, 3)], "n": 2**80})
    for length in range(len(good)):
        refuse(good[:length])
    refuse(good + b"\0")


@pytest.mark.parametrize(
    "head",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
    ids=["list", "map", "bin", "str"],
)
def test_a_length_that_the_bytes_do_not_have_is_refused(head: bytes) -> None:
    refuse(head + b"\0" * 40)


@pytest.mark.parametrize(
    "value",
    [
        extension(3, ["float32", [2], b"\0" * 7]),
        extension(3, ["float32", [2**62], b""]),
        extension(3, ["float32", [2**32, 2**32], b""]),
        extension(3, ["float32", [0, 2**63], b""]),
        extension(3, ["int8", [0, 2**59], b""]),
        extension(3, ["int8", [2**62, 0, 2**62], b""]),
        extension(3, ["float32", [-1, -1], b"\0" * 4]),
        extension(3, ["float32", [True], b"\0" * 4]),
        extension(3, ["float32", [1.0], b"\0" * 4]),
        extension(3, ["float32", [1] * 33, b"\0" * 4]),
        extension(3, ["float32", [1], "text"]),
        extension(3, ["float32", 1, b"\0" * 4]),
        extension(3, ["float32", [1]]),
        extension(3, [["float32"], [1], b"\0" * 4]),
        extension(3, {"a": 1}),
        extension(3, ["float32", [1], b"\0" * 4], 0),
        extension(4, ["float32", b""]),
        extension(4, ["float32", b"\0" * 8]),
        extension(4, "float32"),
        extension(4),
        extension(1, {"a": 1}),
        extension(1, "ab"),
        msgpack.ExtType(5, b"not a date"),
        msgpack.ExtType(5, b"2026-13-01T00:00:00"),
        msgpack.ExtType(5, b"\xff"),
        msgpack.ExtType(5, b""),
        msgpack.ExtType(6, b""),
        msgpack.ExtType(127, b"code"),
        msgpack.Timestamp(1, 1),
        [msgpack.Timestamp(1, 1)],
        extension(1, [msgpack.Timestamp(1, 1)]),
    ],
    ids=str,
)
def test_a_typed_value_of_the_wrong_form_is_refused(value: Any) -> None:
    refuse(value)


@pytest.mark.parametrize("name", ["float4", "zork", "object", "datetime64[ns]", "<f4", ""])
@pytest.mark.parametrize("code", [3, 4])
def test_a_dtype_the_format_does_not_have_is_a_format_error(name: str, code: int) -> None:
    refuse(extension(code, [name, [], b"\0" * 4] if code == 3 else [name, b"\0" * 4]))


def test_a_dtype_has_one_spelling() -> None:
    refuse(extension(4, ["torch.float32", b"\0" * 4]))
    refuse(extension(3, ["torch.float32", [1], b"\0" * 4]))


def test_a_bool_is_zero_or_one() -> None:
    refuse(extension(4, ["bool", b"\2"]))
    refuse(extension(3, ["bool", [2], b"\1\xff"]))


def test_an_integer_has_one_spelling() -> None:
    for payload in (b"", b"\1", b"\0" * 9, b"\0" + b"\x7f" + b"\0" * 9):
        refuse(msgpack.ExtType(2, payload))


def test_a_shape_with_absurdly_many_dims_is_refused_before_it_is_multiplied() -> None:
    start = time.process_time()
    refuse(extension(3, ["int8", [2**64 - 1] * 40_000, b""]))
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "key", [1.5, None, True, b"a", extension(2), msgpack.ExtType(2, b"\1" * 9)], ids=str
)
def test_a_key_that_is_neither_text_nor_a_plain_integer_is_refused(key: Any) -> None:
    refuse(b"\x81" + msgpack.packb(key) + b"\1")
    refuse(b"\x91\x81" + msgpack.packb(key) + b"\1")


def test_a_key_that_is_a_list_is_refused() -> None:
    refuse(b"\x81\x90\1")
    refuse(b"\x81\x80\1")


def test_a_key_that_appears_twice_is_refused() -> None:
    refuse(b"\x82\xa1a\1\xa1a\2", "appears twice")
    refuse(b"\x82\1\1\1\2", "appears twice")


@pytest.mark.parametrize("levels", [32, 100, 1000, 5000, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_deep_nesting_is_refused_without_a_stack_overflow(levels: int, head: bytes) -> None:
    refuse(head * levels + b"\xc0")


@pytest.mark.parametrize("levels", [32, 33, 300, 2000])
def test_deeply_nested_tuples_are_refused_without_a_stack_overflow(levels: int) -> None:
    data = b"\xc0"
    for _ in range(levels):
        body = b"\x91" + data
        data = b"\xc9" + len(body).to_bytes(4, "big") + b"\1" + body
    refuse(data, "levels deep")


def test_text_that_is_not_utf8_is_refused() -> None:
    refuse(b"\xa2\xff\xfe")
    refuse(b"\xa3\xed\xa0\x80")
