"""The pool that every test of a job of several ranks uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what torch itself uses, whoever imports it
    import torch.distributed.optim  # noqa: F401

from tests.live.pool import Pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Processes that run jobs: `gloo.run(2, job, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
