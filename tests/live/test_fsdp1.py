"""Training under FSDP1 is stopped and goes on; the bits are compared in the test of the matrix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

import ckptkit
from ckptkit.errors import UnsupportedTypeError
from ckptkit.live import load, save
from tests.live.fsdp1_ways import OPTIMIZERS, WAYS, Way, ddp, make_adamw, restore, store
from tests.live.gathering import Arrays, Comparison, gathered, same, scramble
from tests.live.network import PARTS, batch, network
from tests.live.pool import Pool
from tests.live.strategies import Job, Layout, fsdp1_flat_tp, fsdp1_hybrid_tp


def evaluate(job: Job) -> None:
    """Leave parameters gathered that only a backward pass would free."""
    with torch.no_grad():
        job.model(batch(0)[0])


def stop_and_go_on(way: Way, folder: str, names: Sequence[str]) -> list[str]:
    """What goes on otherwise than if it had not been stopped."""
    different = []
    for name in names:
        make = OPTIMIZERS[name]
        job = way.job(0, make)
        job.train(range(2))
        evaluate(job)
        store(job, f"{folder}/{name}")
        resumed = way.job(1, make)
        evaluate(resumed)
        assert restore(resumed, f"{folder}/{name}") == "nothing differs"
        if resumed.train(range(2, 4)) != job.train(range(2, 4)):
            different.append(name)
    return different


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_bit_for_bit(gloo: Pool, tmp_path: Path, way: str) -> None:
    names = list(OPTIMIZERS) if way == "full, flat, on 3" else ["Adam, amsgrad"]
    for different in gloo.run(WAYS[way].ranks, stop_and_go_on, WAYS[way], str(tmp_path), names):
        assert not different


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_bit_for_bit_with_any_optimizer(
    gloo: Pool, tmp_path: Path, way: str
) -> None:
    job = functools.partial(stop_and_go_on, names=list(OPTIMIZERS))
    for different in gloo.run(WAYS[way].ranks, job, WAYS[way], str(tmp_path)):
        assert not different


def move(way: Way, folder: str, names: Sequence[str], *, out: bool) -> dict[str, float]:
    """By how much the losses change when a job of DDP goes on in FSDP1, or the reverse."""
    moved = {}
    for name in names:
        make = OPTIMIZERS[name]
        builders = (way.job, ddp) if out else (ddp, way.job)
        source, target = (build(seed, make) for seed, build in enumerate(builders))
        source.train(range(2))
        store(source, f"{folder}/{name}")
        assert restore(target, f"{folder}/{name}") == "nothing differs"
        pairs = zip(source.train(range(2, 4)), target.train(range(2, 4)), strict=True)
        moved[name] = max(abs(a - b) for a, b in pairs)
    return moved


@pytest.mark.parametrize("out", [True, False], ids=["fsdp1 to ddp", "ddp to fsdp1"])
@pytest.mark.parametrize("way", ["full", "full, flat", "no shard, flat"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["AdamW", "RMSprop"], id="two optimizers"),
        pytest.param(list(OPTIMIZERS), marks=pytest.mark.long, id="every optimizer"),
    ],
)
def test_training_goes_on_elsewhere(
    gloo: Pool, tmp_path: Path, way: str, out: bool, names: list[str]
) -> None:
    job = functools.partial(move, names=names, out=out)
    for moved in gloo.run(WAYS[way].ranks, job, WAYS[way], str(tmp_path)):
        assert max(moved.values()) < 1e-5, moved


@pytest.mark.parametrize(
    ("way", "written"),
    [
        ("hybrid", "ddp:2,fsdp:2"),
        ("hybrid, mesh, flat", "repeat=ddp:2,cut=fsdp:2"),
        ("no shard", "ddp:2"),
        ("full, mesh, flat", "cut=fsdp:2"),
    ],
)
def test_the_axes_are_those_of_the_process_groups(
    gloo: Pool, tmp_path: Path, way: str, written: str
) -> None:
    gloo.run(WAYS[way].ranks, save_fresh, WAYS[way], str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert str(step.strategy) == written


def save_fresh(way: Way, location: str) -> None:
    store(way.job(0), location)


CPU = torch.device("cpu")
SLICED = {
    "of tp, flat": Layout(4, "tp:2,fsdp:2", fsdp1_flat_tp),
    "of tp, hybrid": Layout(8, "replicate=ddp:2,shard=fsdp:2,tp:2", fsdp1_hybrid_tp),
}


def stop_on_a_part_of_a_mesh(layout: Layout, location: str) -> tuple[Arrays, list[str]]:
    """What the job held, and what is not so in one that has loaded it."""
    job, resumed = layout.build(0, make_adamw), layout.build(1, make_adamw)
    job.train(range(2))
    store(job, location)
    whole = gathered(job)
    resumed.train([7])
    scramble(resumed, forget=True)
    assert restore(resumed, location) == "nothing differs"
    different = Comparison(resumed).differences(whole)
    assert job.train(range(2, 4)) == resumed.train(range(2, 4))
    return whole, [name for name in different if not name.endswith("seen")]


@pytest.mark.parametrize(
    "way", ["of tp, flat", pytest.param("of tp, hybrid", marks=pytest.mark.long)]
)
def test_fsdp_may_have_a_part_of_the_mesh(gloo: Pool, tmp_path: Path, way: str) -> None:
    layout, whole = SLICED[way], dict[str, Any]()
    found = gloo.run(layout.ranks, stop_on_a_part_of_a_mesh, layout, str(tmp_path))
    for held, different in found:
        assert not different
        whole = dict(held) | whole
    with ckptkit.open(tmp_path) as step:
        assert str(step.strategy) == layout.written
        assert set(step.arrays) == set(whole)
        assert not [name for name in whole if not same(step.read(name), whole[name])]
    one = tmp_path / "one"
    ckptkit.reshard(tmp_path, one, to="single", expect=layout.written)
    with ckptkit.open(one) as step:
        assert not [name for name in whole if not same(step.read(name), whole[name])]


def save_stages(location: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    stage, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    model = network(0).keep(PARTS[2:] if stage else PARTS[:2])
    wrapped = WAYS["full"].wrap(model, device_mesh=mesh["fsdp"])
    save(location, step=1, model=PipelineStage(wrapped, stage, 2, CPU, group=group))


def test_stages_of_a_pipeline_may_be_wrapped(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, save_stages, str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert str(step.strategy) == "pp:2,fsdp:2"
        for name, tensor in network(0).state_dict().items():
            assert same(step.read(f"model/{name}"), tensor.numpy())


def what_is_refused(location: str) -> list[str]:
    """FSDP over a part of one mesh, tensor parallelism over a mesh of its own; and whole replicas
    whose parameters are to be the original ones, which torch makes and cannot train.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    apart = DeviceMesh.from_group(mesh.get_group("tp"), "cpu")
    told = []
    for tp, way in ((apart, "full"), (mesh["tp"], "no shard")):
        model = parallelize_module(network(0), tp, {"head": ColwiseParallel()})
        wrapped = WAYS[way].wrap(model, device_mesh=mesh["fsdp"])
        with pytest.raises(UnsupportedTypeError) as caught:
            save(location, step=1, model=wrapped, optimizer=make_adamw(wrapped.parameters()))
        told.append(str(caught.value))
    return told


def test_what_torch_does_not_join_is_refused(gloo: Pool, tmp_path: Path) -> None:
    for apart, whole in gloo.run(4, what_is_refused, str(tmp_path)):
        assert "head.weight: FSDP1 and tensor parallelism" in apart
        assert "slice both from one" in apart
        assert "head.weight: FSDP1 with NO_SHARD" in whole
    assert not any(tmp_path.iterdir())


class Transposed(nn.Module):
    """Its weights do not lie row by row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 6).t())
        filters: Any = nn.Conv2d(3, 5, 2)  # torch does not annotate memory_format
        self.filter: nn.Module = filters.to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = self.filter(inputs.reshape(1, 3, 2, -1))
        return (inputs @ self.weight).sum() + pixels.square().sum()


def train_once(model: nn.Module) -> Optimizer:
    optimizer = make_adamw(model.parameters())
    model(torch.arange(24.0).reshape(4, 6)).backward()
    optimizer.step()
    return optimizer


def stop_a_transposed_one(way: Way, location: str) -> dict[str, Any]:
    plain, job, resumed = Transposed(0), way.wrap(Transposed(0)), way.wrap(Transposed(1))
    states = train_once(plain).state
    save(location, step=1, model=job, optimizer=train_once(job))
    optimizer = make_adamw(resumed.parameters())
    load(location, model=resumed, optimizer=optimizer)
    save(f"{location}/again", step=1, model=resumed, optimizer=optimizer)
    return {
        f"optimizer/{name}/exp_avg": states[parameter]["exp_avg"].numpy()
        for name, parameter in plain.named_parameters()
    }


@pytest.mark.parametrize("way", ["full", "full, mesh, flat", "no shard, flat"])
def test_parameters_need_not_lie_row_by_row(gloo: Pool, tmp_path: Path, way: str) -> None:
    expected = gloo.run(2, stop_a_transposed_one, WAYS[way], str(tmp_path))[0]
    with ckptkit.open(tmp_path) as step, ckptkit.open(tmp_path / "again") as again:
        for name, values in expected.items():
            np.testing.assert_allclose(step.read(name), values, rtol=1e-5)
        assert not [name for name in step.arrays if not same(step.read(name), again.read(name))]
