"""What nobody wrote is refused by one of ckptkit's errors, or read, whatever the format."""

from __future__ import annotations

import pytest

from tests.fuzzing import accepted


def fuzz(first: int, count: int) -> None:
    assert count / 20 < accepted("tests.foreign.fuzzing", first, count) < count / 2, (
        "few checkpoints get past the first look"
    )


def test_any_checkpoint_is_refused_or_read() -> None:
    fuzz(0, 200)


@pytest.mark.long
def test_many_checkpoints_are_refused_or_read() -> None:
    fuzz(200, 100_000)
