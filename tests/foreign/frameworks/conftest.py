"""What is read by several files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.frameworks.written import written_by


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed wrote."""
    return written_by("deepspeed", tmp_path_factory.mktemp("deepspeed"))
