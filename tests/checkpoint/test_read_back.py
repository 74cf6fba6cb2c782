"""What commits reads back: any two values of two ranks are refused, or every way to look at them
gives what a few plain lines say, written down a second time here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit import PerRank, Replicated, Split, Sum, Writer
from ckptkit.checkpoint.run.verify import object_digest
from ckptkit.errors import CkptkitError, FormatError, UnsupportedTypeError
from ckptkit.format.encoding import dumps
from ckptkit.format.objects import ObjectInfo, total
from ckptkit.live.state.extra import DataRanks, Extra
from ckptkit.model import DTYPES
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.saving import outcomes, random_values, save_by
from tests.cli.programs import ckpt, document

WRAPS: dict[str, Any] = {"replicated": Replicated, "per_rank": PerRank, "sum": Sum, "split": Split}
HUGE = 10**5000

arrays = st.builds(
    random_values,
    st.sampled_from([(), (2,), (0,)]),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 99),
)
small = st.builds(
    lambda shape, dtype, value: np.full(shape, value).astype(dtype),
    st.sampled_from([(), (2,)]),
    st.sampled_from(["bool", "int8", "uint8", "int64", "uint64", "float32", "complex64"]),
    st.integers(0, 100),
)
numbers = (
    st.integers(-9, 9)
    | st.sampled_from([2**53 + 1, 2**63 - 1, 2**64, -(2**70), HUGE, True])
    | st.floats()
    | arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
)
values = arrays | small | numbers | st.just(1j) | st.lists(st.integers(0, 3), max_size=3)
values |= st.lists(st.integers(0, 3), max_size=3).map(tuple) | st.text(max_size=2)
pairs = st.tuples(values, values) | values.map(lambda value: (value, value))
pairs |= st.tuples(arrays | small, arrays | small) | st.tuples(numbers, numbers)


def plain(value: Any) -> Any:
    """A number of numpy as Python's own."""
    if isinstance(value, np.void):
        return complex(float(value["real"]), float(value["imag"]))
    return value.item() if isinstance(value, np.generic) else value


def sum_of(pair: Sequence[Any]) -> Any:
    """The total of two numbers or arrays, as numpy has it; None where a save has to be refused."""
    a, b = pair
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray) or np.shape(a) != np.shape(b):
        return None
    if not isinstance(a, np.ndarray):
        try:
            found = 0 + plain(a) + plain(b)
        except OverflowError:
            return None
        return np.complex128(found) if isinstance(found, complex) else found
    kinds = [x.dtype.kind if x.dtype.names is None else "c" for x in pair]
    dtype = {"i": "int64", "u": "uint64", "c": "complex128"}.get(kinds[0], "float64")
    if "c" in kinds:
        dtype = "complex128"
    elif kinds[1] not in "iub":
        dtype = "float64"
    flat = [[plain(item) for item in x.reshape(-1)] for x in pair]
    if "int" not in dtype:
        kind = complex if dtype == "complex128" else float
        flat = [[kind(item) for item in items] for items in flat]
    sums = [x + y for x, y in zip(*flat, strict=True)]
    limits = np.iinfo(dtype) if "int" in dtype else None
    if limits and any(not limits.min <= item <= limits.max for item in sums):
        return None
    return np.array(sums, dtype).reshape(a.shape)


def expected(semantics: str, pair: Sequence[Any]) -> Any:
    """What a reader without ranks sees; None where a save has to be refused."""
    try:
        wrapped = [WRAPS[semantics](value).value for value in pair]
        encoded = [dumps(value) for value in wrapped]
    except UnsupportedTypeError:
        return None
    match semantics:
        case "replicated":
            return pair[0] if encoded[0] == encoded[1] else None
        case "per_rank":
            return list(pair)
        case "sum":
            return sum_of(pair)
    return pair[0] + pair[1] if type(pair[0]) is type(pair[1]) else None


def alike(found: Any, wanted: Any) -> bool:
    """The same type and value; a NaN is a NaN."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    if dumps(found) == dumps(wanted):
        return True
    x, y = np.asarray(found), np.asarray(wanted)
    if x.dtype != y.dtype or x.dtype.kind not in "fc":
        return False
    return bool(np.array_equal(x, y, equal_nan=True))


def check(semantics: str, pair: Sequence[Any]) -> None:
    wanted = expected(semantics, pair)

    def fill(writer: Writer) -> None:
        writer.add_object("x", WRAPS[semantics](pair[writer.rank]))

    with tempfile.TemporaryDirectory() as folder:
        source = LocalStore(folder)
        errors = outcomes(source, fill, strategy="ddp:2")
        if wanted is None:
            assert all(isinstance(error, CkptkitError) for error in errors), (semantics, pair)
            assert not ckptkit.Run(folder).steps()
            return
        assert errors == [None, None], (semantics, pair)
        shown = document("show", folder)["objects"]
        assert [item["semantics"] for item in shown] == [semantics]
        assert ckpt("show", folder).exit_code == 0
        with ckptkit.open(source) as checkpoint:
            assert alike(checkpoint.objects["x"], wanted), (semantics, pair)
            (item,) = checkpoint.manifest.objects
        assert ckptkit.verify(source) == []
        said = ckptkit.digest(source)
        assert said.objects["x"] == object_digest(item)
        for to in ("ddp:3", "single"):
            other = MemoryStore()
            ckptkit.reshard(source, other, to=to)
            with ckptkit.open(other) as checkpoint:
                assert alike(checkpoint.objects["x"], wanted), (semantics, pair, to)
            assert ckptkit.diff(source, other).same
            assert ckptkit.digest(other).objects == said.objects
            assert ckptkit.verify(other) == []
        check_shares(item, wanted)


def check_shares(item: ObjectInfo, wanted: Any) -> None:
    """A job of three ranks gets shares that add up to the same; NaNs and roundings aside."""
    extra = [Extra({"x": item}, DataRanks(rank, 3, None, None)) for rank in range(3)]
    if item.semantics == "per_rank":
        assert extra[0].get("x", "fallback") == "fallback"
        assert alike(extra[0].of_ranks("x"), wanted)
        return
    shares = [each["x"] for each in extra]
    if item.semantics == "replicated":
        assert all(alike(share, wanted) for share in shares)
    elif isinstance(wanted, (list, tuple)):
        assert alike(type(wanted)(one for share in shares for one in share), wanted)
    elif isinstance(wanted, int) or np.asarray(wanted).dtype.kind in "iu":
        assert alike(total(shares), wanted)
    else:
        assert {np.shape(share) for share in shares} == {np.shape(wanted)}


one, half = np.array([1]), np.array([1.5])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(WRAPS)), pairs)
@example("sum", (one, half))
@example("sum", (half, one))
@example("sum", (one, np.array([2 + 3j])))
@example("sum", (half, np.array([2 + 3j])))
@example("sum", (np.array(2), 1.5))
@example("sum", (1.5, np.array(2)))
@example("sum", (random_values((), "complex_float16"), random_values((), "complex_float16")))
@example("sum", (random_values((1,), "complex_float16")[0], 1))
@example("sum", (10**400, 1.5))
@example("sum", (np.complex64(1), 10**400))
@example("sum", (np.array([2**63 - 1]), np.array([1])))
@example("sum", (np.array([1], "uint64"), np.array([-2])))
@example("sum", (np.array([2**63], "uint64"), np.array([-5])))
@example("sum", (np.array([-5]), np.array([2**63], "uint64")))
@example("sum", (HUGE, 1))
@example("replicated", (HUGE, HUGE))
@example("replicated", (HUGE, 1))
@example("per_rank", ((HUGE, {"a": HUGE}), [HUGE]))
@example("split", (HUGE, 1))
@example("split", ([1], (2,)))
def test_what_commits_reads_back(semantics: str, pair: Sequence[Any]) -> None:
    check(semantics, pair)


@pytest.mark.long
@settings(max_examples=4000, deadline=None)
@given(st.sampled_from(["sum", *sorted(WRAPS)]), pairs)
def test_what_commits_reads_back_whatever_it_is(semantics: str, pair: Sequence[Any]) -> None:
    check(semantics, pair)


@pytest.mark.parametrize(
    ("mixed", "sum_"),
    [([np.array(2), 1.5], 3.5), ([1.5, np.array(2)], 3.5), ([1, np.array(2, "uint8")], 3)],
)
def test_plain_numbers_beside_arrays_without_dims_are_read_where_older_versions_let_them(
    mixed: list[Any], sum_: Any
) -> None:
    assert alike(total(mixed), sum_)


@pytest.mark.parametrize("bad", [[1, 10**400 + 0, 1.5], ["a", 1], [None], [{}, {}], [one, one[:0]]])
def test_what_has_no_total_is_a_format_error(bad: list[Any]) -> None:
    with pytest.raises(FormatError) as error:
        total(bad, "extra/x")
    assert error.value.where == "extra/x"


def test_a_refused_sum_says_which_rank_added_what(tmp_path: Path) -> None:
    def fill(writer: Writer) -> None:
        writer.add_object("extra/x", Sum(np.array(3) if writer.rank else 3))

    with pytest.raises(FormatError, match="rank 1 adds an array, rank 0 a plain number") as error:
        save_by(tmp_path, fill, strategy="ddp:2")
    assert error.value.where == "extra/x"


def test_integers_of_thousands_of_digits_are_compared_and_shown(tmp_path: Path) -> None:
    for name, value in (("a", HUGE), ("b", HUGE + 1)):
        with Writer(tmp_path / name, step=1) as writer:
            writer.add_object("x", value)
    found = document("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert found["object_differences"][0]["a"]["type"] == "int"
    assert "bits" in ckpt("diff", tmp_path / "a", tmp_path / "b").output
    assert ckptkit.diff(tmp_path / "a", tmp_path / "b", atol=1).same
    assert not ckptkit.diff(tmp_path / "a", tmp_path / "b", atol=0.5).same
