"""Training under FSDP1 is stopped and goes on; the bits are compared in the test of the matrix."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import ckptkit
from tests.live.fsdp1_ways import OPTIMIZERS, WAYS, Way, ddp, restore, store
from tests.live.network import batch
from tests.live.pool import Pool
from tests.live.strategies import Job


def evaluate(job: Job) -> None:
    """Leave parameters gathered that only a backward pass would free."""
    with torch.no_grad():
        job.model(batch(0)[0])


def stop_and_go_on(way: Way, folder: str) -> list[str]:
    """What goes on otherwise than if it had not been stopped."""
    different = []
    for name, make in OPTIMIZERS.items():
        job = way.job(0, make)
        job.train(range(5))
        evaluate(job)
        store(job, f"{folder}/{name}")
        resumed = way.job(1, make)
        evaluate(resumed)
        assert restore(resumed, f"{folder}/{name}") == "nothing differs"
        if resumed.train(range(5, 10)) != job.train(range(5, 10)):
            different.append(name)
    return different


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_bit_for_bit(gloo: Pool, tmp_path: Path, way: str) -> None:
    for different in gloo.run(WAYS[way].ranks, stop_and_go_on, WAYS[way], str(tmp_path)):
        assert not different


def move(way: Way, folder: str, *, out: bool) -> dict[str, float]:
    """By how much the losses change when a job of DDP goes on in FSDP1, or the reverse."""
    moved = {}
    for name, make in OPTIMIZERS.items():
        builders = (way.job, ddp) if out else (ddp, way.job)
        source, target = (build(seed, make) for seed, build in enumerate(builders))
        source.train(range(5))
        store(source, f"{folder}/{name}")
        assert restore(target, f"{folder}/{name}") == "nothing differs"
        pairs = zip(source.train(range(5, 10)), target.train(range(5, 10)), strict=True)
        moved[name] = max(abs(a - b) for a, b in pairs)
    return moved


@pytest.mark.parametrize("out", [True, False], ids=["fsdp1 to ddp", "ddp to fsdp1"])
@pytest.mark.parametrize("way", ["full", "full, flat", "no shard, flat"])
def test_training_goes_on_elsewhere(gloo: Pool, tmp_path: Path, way: str, out: bool) -> None:
    job = functools.partial(move, out=out)
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
