"""Failed asserts of the shared modules explain themselves, as those of a test module do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.checkpoint.saving", "tests.storage.contract", "tests.faults.scene", "tests.faults.racing"
)

pytest_plugins = ["tests.servers.fixtures", "tests.live.fixtures"]
