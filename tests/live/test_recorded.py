"""A step says how the job was spread that saved it, as the real objects have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import ckptkit
from ckptkit.live import save
from tests.live.network import network
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, build

LOW = torch.bfloat16


def of_layout(location: str, layout: str) -> None:
    job = build(layout)
    save(location, step=1, model=job.model, optimizer=job.optimizer, differing=["*seen"])


def recorded(location: Path) -> dict[str, Any]:
    with ckptkit.open(location) as step:
        return dict(step.details)


EXPECTED: dict[str, dict[str, Any]] = {
    "fsdp2:2": {"fsdp": {"zero_stage": 3, "units": 4, "offload": "OffloadPolicy"}},
    "zero2:2": {"fsdp": {"zero_stage": 2}},
    "fsdp1:2": {"fsdp": {"sharding_strategy": "FULL_SHARD", "zero_stage": 3}},
    "fsdp1:2, grad op": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "zero_stage": 2}},
    "tp:2": {"tp": {"cut_dims": {"0": 6, "1": 2}}},
    "fsdp1:2, tp:2": {
        "fsdp": {"sharding_strategy": "FULL_SHARD", "zero_stage": 3},
        "tp": {"cut_dims": {"0": 6, "1": 2}},
    },
    "pp:2, two stages each": {"pipeline": {"stages": 4, "ranks": 2}},
    "pp:2,fsdp:1,tp:2": {"pipeline": {"stages": 2}, "fsdp": {"zero_stage": 3}, "tp": {}},
}


@pytest.mark.parametrize("layout", EXPECTED)
def test_a_step_says_how_its_job_was_spread(gloo: Pool, tmp_path: Path, layout: str) -> None:
    gloo.run(LAYOUTS[layout].ranks, of_layout, str(tmp_path), layout)
    details = recorded(tmp_path)
    assert details["precision"] == {"parameters": ["float32"]}
    for part, values in EXPECTED[layout].items():
        assert values.items() <= details[part].items()


def with_options(location: str) -> None:
    ddp = DistributedDataParallel(
        network(0).to(LOW), bucket_cap_mb=3, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    save(f"{location}/ddp", step=1, model=ddp)
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    offloaded = fully_shard(
        network(0), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    save(f"{location}/fsdp2", step=1, model=offloaded)
    mixed = FullyShardedDataParallel(
        network(0),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
    )
    save(f"{location}/fsdp1", step=1, model=mixed)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("my_shards",))
    save(f"{location}/named", step=1, model=fully_shard(network(0), mesh=mesh))


def test_a_step_says_the_options_of_its_wrappers(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, with_options, str(tmp_path))
    ddp = recorded(tmp_path / "ddp")
    assert ddp["precision"] == {"parameters": ["bfloat16"]}
    assert ddp["ddp"]["bucket_bytes"] == 3 << 20
    assert ddp["ddp"]["gradient_as_bucket_view"]
    assert not ddp["ddp"]["broadcast_buffers"]
    fsdp2 = recorded(tmp_path / "fsdp2")["fsdp"]
    expected = {"parameters": "bfloat16", "reduction": "float32"}
    assert expected.items() <= fsdp2["mixed_precision"].items()
    assert fsdp2["offload"] == "CPUOffloadPolicy"
    assert expected.items() <= recorded(tmp_path / "fsdp1")["fsdp"]["mixed_precision"].items()
    with ckptkit.open(tmp_path / "named") as step:
        assert str(step.strategy) == "my_shards=fsdp:2"
