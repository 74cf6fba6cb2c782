"""After `stage()` nothing the caller changes reaches the step."""

from __future__ import annotations

import numpy as np
import pytest

import ckptkit
from ckptkit import Sum, Writer
from ckptkit.errors import UsageError
from ckptkit.storage import MemoryStore


def test_what_changes_after_staging_is_not_saved() -> None:
    store = MemoryStore()
    weight = np.arange(3000.0)
    seen = np.arange(4)
    state = {"lr": 0.1, "seen": seen}
    writer = Writer(store, step=1, details={"precision": state})
    writer.add("model/w", weight)
    writer.add_object("state", state)
    writer.stage()
    weight[:] = -1
    state["lr"] = 7.0
    seen[:] = 9
    writer.commit()
    with ckptkit.open(store) as checkpoint:
        assert checkpoint["model/w"][...].tolist() == np.arange(3000.0).tolist()
        assert checkpoint.objects["state"]["lr"] == 0.1
        assert checkpoint.objects["state"]["seen"].tolist() == [0, 1, 2, 3]
        assert checkpoint.details["precision"]["lr"] == 0.1
    assert ckptkit.verify(store) == []


def test_nothing_can_be_added_or_staged_after_staging() -> None:
    writer = Writer(MemoryStore(), step=1)
    writer.add("model/w", np.zeros(3))
    writer.stage()
    with pytest.raises(UsageError):
        writer.add("model/v", np.zeros(3))
    with pytest.raises(UsageError):
        writer.add_alias("model/v", "model/w")
    with pytest.raises(UsageError):
        writer.add_object("n", 1)
    with pytest.raises(UsageError):
        writer.stage()


def test_sums_do_not_wrap() -> None:
    store = MemoryStore()
    with Writer(store, step=1) as writer:
        writer.add_object("small", Sum(np.int32(2**31 - 1)))
        writer.add_object("bytes", Sum(np.full(2, 200, np.uint8)))
    with ckptkit.open(store) as checkpoint:
        assert checkpoint.objects["small"] == 2**31 - 1
        assert checkpoint.objects["bytes"].dtype == np.uint64
