"""Training without barriers: workers push gradients and pull parameters, each at its own pace."""

from __future__ import annotations

from ckptkit.parallel.optimizers.asynchronous.asynchronous import AsynchronousSGD

__all__ = ["AsynchronousSGD"]
