"""A module that nothing wraps: every rank of the job holds the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckptkit.live.adapters.adapter import InPlace
from ckptkit.live.groups import Group


class PlainAdapter(InPlace):
    """Any module."""

    def recognises(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def groups(self, module: nn.Module) -> list[Group]:  # noqa: ARG002
        """None of its own."""
        return []

    def details(self, module: nn.Module) -> dict[str, Any]:
        """The dtypes of the parameters."""
        found: set[torch.dtype] = {parameter.dtype for parameter in module.parameters()}
        return {"precision": {"parameters": sorted(str(d).removeprefix("torch.") for d in found)}}
