"""The pool that every test of a job of several ranks uses, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.live.pool import Pool


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    from tests.live.pool import Pool  # noqa: PLC0415 — tests without jobs need no torch

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gloo(_pool: Pool) -> Iterator[Pool]:
    """Processes that run jobs: `gloo.run(2, job, *args)`. They end with the module: none makes
    and destroys hundreds of process groups, whose threads torch keeps.
    """
    yield _pool
    _pool.end()
