"""Failed asserts of the shared modules explain themselves, as those of a test module do."""

from __future__ import annotations

import gc
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How many examples a property is tried on: `make test` takes few, and `make test-long` many.
# No example has a time limit: on a machine that is busy any of them may be slow.
UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("few", max_examples=25, **UNHURRIED)
settings.register_profile("many", max_examples=1000, **UNHURRIED)
settings.load_profile("few")

# Started in the background by a shell, pytest ignores Ctrl-C, and all that tests start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite(
    "tests.checkpoint.saving",
    "tests.foreign.contract",
    "tests.storage.contract",
    "tests.storage.sink_contract",
    "tests.faults.scene",
    "tests.faults.racing",
)

pytest_plugins = ["tests.servers.fixtures", "tests.live.fixtures"]

# The longest first: begun last, any of these would keep one worker busy long after the others.
LONG = (
    "test_elastic.py",
    "test_docs.py",
    "test_examples.py",
    "test_matrix.py",
    "test_save.py",
    "test_optimizers.py",
    "test_object_retries.py",
    "test_deepspeed.py",
    "test_ranks.py",
    "test_launch.py",
    "test_checkpoints.py",
    "test_mpi.py",
    "test_kill.py",
    "test_megatron.py",
    "test_sharded_optimizer.py",
    "test_dcp.py",
    "test_fsdp1.py",
    "test_orbax.py",
    "test_accelerate.py",
    "test_lightning.py",
    "test_training.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: nothing looks through it for garbage again."""
    gc.collect()
    gc.freeze()
