"""What spreads a model over ranks: any strategy in one line, on torch's own engines."""

from __future__ import annotations

from ckptkit.parallel.optimizers.asynchronous import AsynchronousSGD
from ckptkit.parallel.optimizers.compression import Compression
from ckptkit.parallel.optimizers.elastic import ElasticTraining, GlobalSampler
from ckptkit.parallel.optimizers.methods import compression_of
from ckptkit.parallel.ranks import current_communicator, init, run_in_memory
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.strategies import as_distributed
from ckptkit.parallel.strategies.distributed import Bytes, Distributed, Memory

__all__ = [
    "AsynchronousSGD",
    "Bytes",
    "Communicator",
    "Compression",
    "Distributed",
    "ElasticTraining",
    "GlobalSampler",
    "Memory",
    "as_distributed",
    "compression_of",
    "current_communicator",
    "init",
    "run_in_memory",
]
