"""Any strategy in one line."""

from __future__ import annotations

from ckptkit.parallel.strategies.distributed import Bytes, Distributed, Memory
from ckptkit.parallel.strategies.spread import as_distributed

__all__ = ["Bytes", "Distributed", "Memory", "as_distributed"]
