"""What was not sent, to be added to the next gradients: each rank has its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.errors import UsageError
from ckptkit.parallel.optimizers.compression.wire import Wire

log = logging.getLogger("ckptkit.parallel")

_AXIS = "ddp"


def as_rows(residuals: Mapping[str, torch.Tensor], wire: Wire) -> dict[str, torch.Tensor]:
    """The residuals of all ranks, one row for each; in memory only the row of this one."""
    if not residuals:
        return {}
    device = next(iter(residuals.values())).device.type
    mesh = DeviceMesh.from_group(wire.group, device, mesh_dim_names=(_AXIS,))
    return {
        name: DTensor.from_local(residual[None], mesh, [Shard(0)], run_check=False)
        for name, residual in residuals.items()
    }


def from_rows(
    rows: Mapping[str, torch.Tensor],
    wire: Wire,
    parameter_of: Callable[[str], torch.Tensor | None],
    ranks: int,
) -> dict[str, torch.Tensor]:
    """The residuals of this rank; in a job of another number of ranks, the mean of all."""
    if rows and ranks != wire.size and wire.rank == 0:
        log.info("residuals of %d ranks are shared out among %d", ranks, wire.size)
    found = {}
    for name, tensor in rows.items():
        parameter = parameter_of(name)
        whole: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if parameter is None or whole.shape[1:] != parameter.shape:
            raise UsageError(
                "a residual of no parameter of the model",
                where=f"compression, {name}",
                value=tuple(whole.shape[1:]),
            )
        found[name] = _row(whole, wire, ranks).to(parameter.device, torch.float32)
    return found


def _row(whole: torch.Tensor, wire: Wire, ranks: int) -> torch.Tensor:
    if len(whole) == ranks == wire.size:
        return whole[wire.rank].clone()
    if len(whole) == 1 and ranks == wire.size:
        return whole[0]  # of this rank only
    # Gradients are averaged over ranks: what was left unsent in all of them stays the same.
    return whole.mean(0)
