"""Facts for pages that no step has given."""

from __future__ import annotations

from typing import Any

import ckptkit
from ckptkit.page import step_facts
from ckptkit.storage import MemoryStore


def no_facts() -> dict[str, Any]:
    """A step of one rank without arrays."""
    store = MemoryStore()
    with ckptkit.Writer(store, step=1):
        pass
    with ckptkit.open(store) as checkpoint:
        return {"ckptkit": "0", "step": step_facts(checkpoint), "run": None}
