"""The pool that every test of a job of several ranks uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what torch itself uses, whoever imports it
    import torch.distributed.optim  # noqa: F401

from tests.live.pool import Pool


@pytest.hookimpl(tryfirst=True)  # before xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One pool is enough: under xdist all that need it run in the same of its workers."""
    for item in items:
        if "gloo" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Processes that run jobs: `gloo.run(2, job, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
