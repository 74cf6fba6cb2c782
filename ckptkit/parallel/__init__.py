"""What spreads a model over ranks: any strategy in one line, on torch's own engines."""

from __future__ import annotations

from ckptkit.parallel.communication.communicator import Communicator
from ckptkit.parallel.communication.current import current_communicator
from ckptkit.parallel.communication.running import run_in_memory
from ckptkit.parallel.communication.starting import init
from ckptkit.parallel.optimizers.asynchronous import AsynchronousSGD
from ckptkit.parallel.optimizers.compression import Compression
from ckptkit.parallel.optimizers.elastic import ElasticTraining
from ckptkit.parallel.optimizers.methods import compression_of
from ckptkit.parallel.optimizers.sampler import GlobalSampler
from ckptkit.parallel.strategies import Bytes, Distributed, Memory, as_distributed

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
