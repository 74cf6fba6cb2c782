"""Any strategy in one line."""

from __future__ import annotations

from ckptkit.parallel.strategies.distributed import Distributed
from ckptkit.parallel.strategies.memory import Bytes, Memory
from ckptkit.parallel.strategies.spreading import as_distributed

__all__ = ["Bytes", "Distributed", "Memory", "as_distributed"]
