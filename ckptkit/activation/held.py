"""Saved tensors that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Held:
    """What hooks on saved tensors give autograd, which then no longer checks it for changes."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Held:
        """Hold a tensor that backward will need as it is now."""
        # A result would hold the graph that holds it.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def get(self) -> torch.Tensor:
        """The tensor, if nobody has changed it."""
        if self.tensor._version != self.version:
            raise UsageError(
                "a tensor that backward needs was changed in place after the forward",
                value=f"{self.tensor.dtype}{list(self.tensor.shape)}",
                hint="compute out of place, and change parameters only after the backward",
            )
        return self.tensor
