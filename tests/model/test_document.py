from __future__ import annotations

from typing import Any

import pytest

from ckptkit.errors import UsageError
from ckptkit.model.document import parse_size


@pytest.mark.parametrize(
    ("what", "nbytes"),
    [
        (4096, 4096),
        ("1", 1),
        ("4096B", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("1GB", 10**9),
        (" 1.5 gib ", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_a_size_is_a_number_or_has_decimal_or_binary_units(what: int | str, nbytes: int) -> None:
    assert parse_size(what) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 M", "1Mib/s", "1e9", "nan", "9" * 20, True, 1.5, None]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize("what", [0, -1, "0", "0.0001"])
def test_less_than_a_byte_is_refused(what: int | str) -> None:
    with pytest.raises(UsageError, match="less than one byte"):
        parse_size(what)
