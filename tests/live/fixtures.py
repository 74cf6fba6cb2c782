"""The pool that every test of a job of several ranks uses, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.live.pool import Pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Processes that run jobs: `gloo.run(2, job, *args)`."""
    from tests.live.pool import Pool  # noqa: PLC0415 — tests without jobs need no torch

    pool = Pool()
    yield pool
    pool.close()
