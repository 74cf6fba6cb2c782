"""DistributedDataParallel: every rank of its group holds the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ckptkit.live.adapters.adapter import Entry, InPlace, ddp_wrappers
from ckptkit.live.groups import Group, group_of


class DDPAdapter(InPlace):
    """Modules in `DistributedDataParallel` or its composable `replicate`, anywhere in the model."""

    def recognises(self, module: nn.Module) -> bool:
        """Whether some module is wrapped."""
        return bool(ddp_wrappers(module))

    def groups(self, module: nn.Module) -> list[Group]:
        """The ranks among which gradients are averaged."""
        return [group_of("ddp", wrapper.process_group) for wrapper in ddp_wrappers(module)]

    def entries(self, module: nn.Module) -> list[Entry]:
        """The module's own tensors; the wrappers keep those parameters alike that they know.

        Between two forward passes buffers such as running means differ, until the wrapper gives
        all ranks those of the first.
        """
        kept = {id(p) for wrapper in ddp_wrappers(module) for p in wrapper._module_parameters}
        broadcast = {
            id(buffer)
            for wrapper in ddp_wrappers(module)
            if wrapper.broadcast_buffers
            for name, buffer in wrapper.module.named_buffers()
            if name not in wrapper.parameters_to_ignore
        }
        return [
            replace(e, is_kept_alike=id(e.value) in kept)
            if e.is_parameter
            else replace(e, is_broadcast=id(e.value) in broadcast)
            for e in super().entries(module)
        ]

    def details(self, module: nn.Module) -> dict[str, Any]:
        """The size of its buckets, and how it treats buffers and gradients."""
        wrapper = ddp_wrappers(module)[0]
        mixed = wrapper.mixed_precision
        return {
            "ddp": {
                "bucket_bytes": int(wrapper.bucket_bytes_cap),
                "broadcast_buffers": bool(wrapper.broadcast_buffers),
                "gradient_as_bucket_view": bool(wrapper.gradient_as_bucket_view),
                "static_graph": bool(wrapper.static_graph),
                "mixed_precision": None if mixed is None else str(mixed),
            }
        }
