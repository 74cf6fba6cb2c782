"""Failed asserts of the shared modules explain themselves, as those of a test module do."""

from __future__ import annotations

import signal

import pytest

# Started in the background by a shell, pytest ignores Ctrl-C, and all that tests start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite(
    "tests.checkpoint.saving",
    "tests.storage.contract",
    "tests.storage.sink_contract",
    "tests.faults.scene",
    "tests.faults.racing",
)

pytest_plugins = ["tests.servers.fixtures", "tests.live.fixtures"]

# Begun last, any of these would keep one worker busy for minutes after the others have ended.
LONG = ("test_elastic.py", "test_examples.py", "test_launch.py", "test_ranks.py", "test_matrix.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long."""
    items.sort(key=lambda item: item.path.name not in LONG)
