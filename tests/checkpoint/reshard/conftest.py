"""No test waits to see whether another run is still writing."""

from __future__ import annotations

import pytest

from ckptkit.checkpoint.reshard import engines


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unfinished counts as abandoned at once."""
    monkeypatch.setattr(engines, "QUIET_SECONDS", 0.0)
