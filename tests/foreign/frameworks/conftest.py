"""What is read by several files of tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.foreign.frameworks import deepspeed_folders
from tests.foreign.frameworks.written import written_by


@pytest.fixture(scope="session")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with what a framework wrote, which it does for the first who asks."""
    return cache(lambda framework: written_by(framework, tmp_path_factory.mktemp(framework)))


@pytest.fixture(scope="session")
def written(written_once: Callable[[str], Path]) -> Path:
    """What DeepSpeed wrote."""
    return written_once("deepspeed")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of DeepSpeed's names, for torch."""
    for name, module in deepspeed_folders.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
