"""What is read by several files of tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.foreign.frameworks import deepspeed_folders
from tests.foreign.frameworks.written import written_by


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed wrote."""
    return written_by("deepspeed", tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of DeepSpeed's names, for torch."""
    for name, module in deepspeed_folders.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
