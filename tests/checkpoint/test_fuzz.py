"""What nobody wrote, with the right checksum, is refused by one of ckptkit's errors or is read."""

from __future__ import annotations

import pytest

from tests.fuzzing import accepted


def fuzz(first: int, count: int) -> None:
    assert count / 10 < accepted("tests.checkpoint.fuzzing", first, count) < count / 2, (
        "few documents get past the first look"
    )


def test_any_document_is_refused_or_read() -> None:
    fuzz(0, 400)


@pytest.mark.long
def test_many_documents_are_refused_or_read() -> None:
    fuzz(400, 50_000)
