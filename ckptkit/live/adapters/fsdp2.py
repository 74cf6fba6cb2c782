"""`fully_shard` (FSDP2): parameters are DTensors, cut along one axis and perhaps repeated along
another.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckptkit.live.adapters.adapter import InPlace
from ckptkit.live.groups import Group, assumed, mesh_groups


class FSDP2Adapter(InPlace):
    """Modules to which `fully_shard` was applied."""

    def recognises(self, module: nn.Module) -> bool:
        """Whether it was applied to some module."""
        return any(isinstance(m, FSDPModule) for m in module.modules())

    def groups(self, module: nn.Module) -> list[Group]:
        """The axis that cuts, and the one that repeats (HSDP)."""
        found: list[Group] = []
        for info in (group.mesh_info for group in _param_groups(module)):
            kinds = ["ddp"] * info.mesh.ndim
            if info.shard_mesh_dim is not None:
                kinds[info.shard_mesh_dim] = "fsdp"
            # It cuts by the ranks of its group, which torch numbers upwards whatever the mesh does.
            found += assumed(mesh_groups(info.mesh, tuple(kinds)))
        return list(dict.fromkeys(found))

    def details(self, module: nn.Module) -> dict[str, Any]:
        """The stage of ZeRO that it amounts to, its precision and offloading."""
        groups = _param_groups(module)
        if not groups:
            return {}
        # The outermost module stays gathered on its own, and often the last of several units.
        gathered = [group.post_forward_mesh_info is None for group in groups]
        policy = groups[0].mp_policy
        return {
            "fsdp": {
                "zero_stage": 2 if all(gathered) else 3,
                "units": len(groups),
                "mixed_precision": {
                    "parameters": _name(policy.param_dtype),
                    "reduction": _name(policy.reduce_dtype),
                    "output": _name(policy.output_dtype),
                },
                "offload": type(groups[0].offload_policy).__name__,
            }
        }


def fsdp_lines(module: nn.Module) -> set[tuple[int, ...]]:
    """The lines of ranks along which `fully_shard` cuts or repeats, in the order of ranks and in
    that of its mesh.
    """
    groups = FSDP2Adapter().groups(module)
    return {line for group in groups for line in (group.ranks, group.by_mesh) if line}


def _param_groups(module: nn.Module) -> list[Any]:
    return [g for m in module.modules() if isinstance(m, FSDPModule) for g in own_param_groups(m)]


def own_param_groups(module: FSDPModule) -> list[Any]:
    """What is gathered for a module, or for it and others, by the names of several torches."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several:  # asked for the one, torch raises where there are more
        return list(several)
    single = getattr(state, "_fsdp_param_group", None)
    return [single] if single else []


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
