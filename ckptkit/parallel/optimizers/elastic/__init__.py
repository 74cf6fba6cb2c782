"""Training that goes on when workers come and go."""

from __future__ import annotations

from ckptkit.parallel.optimizers.elastic.sampler import GlobalSampler
from ckptkit.parallel.optimizers.elastic.training import ElasticTraining, Step

__all__ = ["ElasticTraining", "GlobalSampler", "Step"]
