"""Planners of DCP as their users make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)


class Half(DefaultSavePlanner):
    """Casts what it saves, in its plan and in the data."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 — torch's
        made = super().transform_object(write_item, object)
        return made.half() if isinstance(made, torch.Tensor) else made


class Rows(DefaultSavePlanner):
    """Writes tensors row by row, as tensors with several shards on a rank are written."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if (data := item.tensor_data) is None or not data.size:
                items.append(item)
                continue
            for row in range(data.size[0]):
                offset = torch.Size([row, *[0] * (len(data.size) - 1)])
                chunk = ChunkStorageMetadata(offset, torch.Size([1, *data.size[1:]]))
                index = MetadataIndex(item.index.fqn, offset)
                whole = replace(data, chunk=chunk)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=whole))
        return replace(plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found[index.offset[0] :][:1] if index.offset else found


class Turns(DefaultSavePlanner):
    """Lets one rank write all tensors, which all ranks have alike."""

    def __init__(self, writing: int) -> None:
        super().__init__()
        self.writing = writing

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        tensors = [item for plan in plans for item in plan.items if item.tensor_data]
        for rank, plan in enumerate(plans):
            values = [item for item in plan.items if not item.tensor_data]
            items = values + (tensors if rank == self.writing else [])
            plans[rank] = replace(plan, items=items)
        return plans, metadata


class ThroughOneBuffer(DefaultLoadPlanner):
    """Lends one buffer for all tensors, and remembers which of them it is lent for."""

    buffer = torch.empty(64)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.target = super().resolve_tensor(read_item)
        return self.buffer[: read_item.lengths.numel()].view(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.target.copy_(tensor)


class PlansAnew(DefaultLoadPlanner):
    """Makes another plan of what it was told, and keeps no more of that than the items."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(central_plan.items)
