from __future__ import annotations

import click
import pytest
from ckptkit.cli.options import seconds_of

from ckptkit import size_text


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90s", 90), ("1.5m", 90), ("1h", 3600), ("2D", 172800)]
)
def test_a_span_of_time_has_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "h", "-1h", "1 year"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="span of time"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (5 << 60, "5120.0 PiB"),
    ],
)
def test_sizes_are_shown_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
