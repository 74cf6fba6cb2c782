"""One thread, as the ranks of jobs have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where the cores are busy
    yield
    torch.set_num_threads(threads)
