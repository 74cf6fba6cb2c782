from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptkit.errors import UnsupportedTypeError
from ckptkit.model import DTYPES, DType

every = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


@every
def test_every_way_to_name_a_dtype_finds_the_same(dtype: DType) -> None:
    for what in (dtype, dtype.name, dtype.numpy, f"torch.{dtype.torch}"):
        assert DType.of(what) is dtype


@every
def test_the_torch_dtype_of_the_same_name_has_the_same_size(dtype: DType) -> None:
    found = getattr(torch, dtype.torch)
    assert DType.of(found) is dtype
    assert found.itemsize == dtype.itemsize


@every
def test_bits_are_elements_of_the_same_size_that_copy_untouched(dtype: DType) -> None:
    raw = np.random.default_rng(0).integers(0, 256, dtype.itemsize * 64, np.uint8)
    assert dtype.bits.itemsize == dtype.itemsize == dtype.numpy.itemsize
    copied = raw.view(dtype.bits).reshape(8, 8).T.copy().T.copy()
    assert copied.tobytes() == raw.tobytes()


@every
def test_a_dtype_is_itself_after_a_journey(dtype: DType) -> None:
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.deepcopy(dtype) is dtype
    assert str(dtype) == dtype.name


def test_scalar_types_are_dtypes() -> None:
    assert DType.of(np.float32).name == "float32"
    assert DType.of(np.longlong).name == DType.of(np.int_).name == "int64"
    assert DType.of(ml_dtypes.bfloat16).name == "bfloat16"


def test_the_half_complex_of_torch_is_a_pair_in_numpy() -> None:
    dtype = DType.of("torch.complex32")
    assert (dtype.name, dtype.itemsize) == ("complex_float16", 4)
    assert dtype.numpy.names == ("real", "imag")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (np.dtype(">f4"), "big-endian"),
        (np.dtype([("real", ">f2"), ("imag", ">f2")]), "big-endian"),
        ("int4", "smaller than a byte"),
        (np.dtype(ml_dtypes.int4), "smaller than a byte"),
        ("torch.uint4", "smaller than a byte"),
        ("torch.float4_e2m1fn_x2", "smaller than a byte"),
        ("torch.quint4x2", "smaller than a byte"),
        ("torch.qint8", "quantised"),
        (torch.quint8, "quantised"),
        (np.dtype(object), "never pickled"),
        (np.dtype("U3"), "text"),
        (np.str_, "text"),
        (np.dtype("S3"), "text"),
        (np.dtypes.StringDType(), "text"),
        (np.dtype("M8[s]"), "times"),
        (np.dtype("m8[s]"), "times"),
        (np.floating, "no such"),
        (np.longdouble, "no such"),
        (float, "no such"),
        (None, "no such"),
        ("complex32", "no such"),
        ("torch.nothing", "no such"),
        (torch.device("cpu"), "no such"),
    ],
    ids=str,
)
def test_what_cannot_be_stored_is_refused_with_the_reason(what: object, reason: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=reason) as caught:
        DType.of(what)
    assert caught.value.hint


def test_a_misspelt_name_gets_a_guess() -> None:
    with pytest.raises(UnsupportedTypeError, match="bfloat16"):
        DType.of("bfloat")


def test_the_names_are_unique_and_fixed() -> None:
    assert len(DTYPES) == 21
    with pytest.raises(TypeError):
        DTYPES["mine"] = DType.of("int8")  # type: ignore[index]
