"""Values that check themselves: what a tensor is, how it is cut, and which rank holds what. Rules,
which few commands need, are imported from their own module.
"""

from __future__ import annotations

from ckptkit.model.box import MAX_COORDINATE, Box, flat_boxes
from ckptkit.model.dtype import DTYPES, DType
from ckptkit.model.grid import MAX_CHUNKS, Grid
from ckptkit.model.layout import Assigned, Layout, Part, Replicas, Share, layout_of
from ckptkit.model.strategy import (
    KINDS,
    MAX_AXES,
    MAX_WORLD_SIZE,
    Axis,
    Mesh,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    parse_placement,
    placement_from_doc,
    placement_to_doc,
)

__all__ = [
    "DTYPES",
    "KINDS",
    "MAX_AXES",
    "MAX_CHUNKS",
    "MAX_COORDINATE",
    "MAX_WORLD_SIZE",
    "Assigned",
    "Axis",
    "Box",
    "DType",
    "Grid",
    "Layout",
    "Mesh",
    "Owner",
    "Part",
    "Placement",
    "Replicas",
    "Replicate",
    "Shard",
    "Share",
    "Stage",
    "Strategy",
    "Strided",
    "flat_boxes",
    "layout_of",
    "parse_placement",
    "placement_from_doc",
    "placement_to_doc",
]
