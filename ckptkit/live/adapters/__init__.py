"""What ckptkit knows of the ways to spread a model over ranks: one file for each."""

from __future__ import annotations

from torch import nn

from ckptkit.live.adapters.adapter import Adapter, Entry
from ckptkit.live.adapters.ddp import DDPAdapter
from ckptkit.live.adapters.fsdp1 import FSDP1Adapter
from ckptkit.live.adapters.fsdp2 import FSDP2Adapter
from ckptkit.live.adapters.plain import PlainAdapter
from ckptkit.live.adapters.tensor_parallel import TensorParallelAdapter

__all__ = ["Adapter", "Entry", "adapters_for", "entries_of"]

# The first that reads tensors in a way of its own is asked for them.
_ADAPTERS: tuple[Adapter, ...] = (
    FSDP1Adapter(),
    DDPAdapter(),
    FSDP2Adapter(),
    TensorParallelAdapter(),
    PlainAdapter(),
)


def adapters_for(module: nn.Module) -> list[Adapter]:
    """All that recognise a module, which may be wrapped in several ways; the last always does."""
    return [adapter for adapter in _ADAPTERS if adapter.recognises(module)]


def entries_of(module: nn.Module) -> list[Entry]:
    """The tensors of a module, as the adapter that knows it best reads them."""
    return adapters_for(module)[0].entries(module)
