"""Tensor parallelism (`parallelize_module`, or DTensors made by hand)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.live.adapters.adapter import InPlace, dtensors
from ckptkit.live.adapters.fsdp2 import fsdp_lines
from ckptkit.live.groups import Group, dtensor_groups, mesh_groups


class TensorParallelAdapter(InPlace):
    """Modules with DTensors; what FSDP cuts is told apart by FSDP's own adapter."""

    def recognises(self, module: nn.Module) -> bool:
        """Whether there are DTensors."""
        return bool(dtensors(module))

    def groups(self, module: nn.Module) -> list[Group]:
        """The axes along which some tensor is cut, and those that only repeat."""
        # What FSDP cuts says nothing of tensor parallelism: FSDP's own adapter names that axis.
        fsdp = fsdp_lines(module)
        return [group for group in dtensor_groups(dtensors(module)) if group.ranks not in fsdp]

    def details(self, module: nn.Module) -> dict[str, Any]:
        """How many tensors are cut along each dim, by others than FSDP."""
        fsdp = fsdp_lines(module)
        dims: dict[str, int] = {}
        lines: dict[DeviceMesh, list[Group]] = {}
        for tensor in dtensors(module):
            mesh = tensor.device_mesh
            if mesh not in lines:
                lines[mesh] = mesh_groups(mesh, ("tp",) * mesh.ndim)
            for line, place in zip(lines[mesh], tensor.placements, strict=bool(lines[mesh])):
                if line.ranks not in fsdp and line.size > 1 and hasattr(place, "dim"):
                    dims[str(place.dim)] = dims.get(str(place.dim), 0) + 1
        return {"tp": {"cut_dims": dict(sorted(dims.items()))}} if dims else {}
