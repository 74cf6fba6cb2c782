"""Where bytes go, counted element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import page
from ckptkit.model import Box
from ckptkit.page import flows_of
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Tensor, random_values, save

RULES = {
    "rules": [
        {"match": "*qkv", "tp": "shard(0, blocks=[8,4,4], unit=4)"},
        {"match": "*w", "tp": "shard(1)"},
        {"match": "*", "tp": "replicate"},
    ]
}


@pytest.mark.parametrize("to", ["tp:4", "tp:2,fsdp:2", "ddp:2,fsdp:3", "tp:20", "single"])
def test_flows_are_those_of_each_element(tmp_path: Path, to: str) -> None:
    state = {
        "model/w": Tensor(random_values((13, 60)), {"fsdp": "strided(0)", "tp": "shard(0)"}),
        "model/w2": Tensor(random_values((13, 60)), {"fsdp": "strided(0)", "tp": "shard(0)"}),
        "model/qkv": Tensor(random_values((16, 6), "bfloat16"), {"tp": "shard(0)"}),
        "model/b": Tensor(random_values((7,))),
        "model/none": Tensor(random_values((0, 3))),
        "model/scale": Tensor(random_values(())),
    }
    if to == "tp:20":  # more ranks than heads: some hold the same
        del state["model/qkv"]
    save(tmp_path, state, strategy="fsdp:2,tp:2", chunk_bytes=64)
    plan = ckptkit.plan_reshard(tmp_path, MemoryStore(), to=to, rules=RULES)
    flows = flows_of(plan)
    assert flows is not None
    manifest, ranks = plan.checkpoint.manifest, plan.target.world_size
    wanted, stays = np.zeros((len(manifest.packs), ranks)), 0.0
    for array in plan.arrays:
        packs, whole = np.zeros(array.source.shape, np.int64), Box.whole(array.source.shape)
        grid, first = array.source.grid, plan.checkpoint.first_row(array.source.name)
        for chunk in range(grid.chunk_count):
            inside: Any = (*grid.box(grid.index(chunk)).within(whole), ...)
            packs[inside] = manifest.pack[first + chunk]
        for rank in range(ranks):
            for share in array.layout.shares(rank):
                for box in share.boxes:
                    inside = (*box.within(whole), ...)
                    there = packs[inside].reshape(-1)
                    weights = np.full(there.size, 4 if array.info.dtype.itemsize == 4 else 2)
                    here = np.bincount(there, weights / share.replicas.count, len(manifest.packs))
                    wanted[:, rank] += here
                    stays += here[rank] if rank < len(here) else 0
    groups = np.arange(ranks) * min(ranks, 16) // ranks
    folded = np.stack([wanted[:, groups == group].sum(axis=1) for group in np.unique(groups)])
    assert flows["bytes"] == np.rint(folded.T).astype(int).tolist()
    assert flows["targets"] == np.bincount(groups).tolist()
    assert flows["in_place"] == round(stays)


def test_too_many_parts_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"model/w{number}": Tensor(random_values((9 + number, 2))) for number in range(7)}
    save(tmp_path, state)
    rows = {"rules": [{"match": "*", "tp": "shard(0)"}]}
    few = ckptkit.plan_reshard(tmp_path, MemoryStore(), to="tp:9", rules=rows)
    assert flows_of(few) is not None
    monkeypatch.setattr(page, "_MOST_PARTS", 30)
    assert flows_of(few) is None
