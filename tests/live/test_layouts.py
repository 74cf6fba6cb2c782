"""Layouts that torch makes besides those of its wrappers: DTensors on meshes of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict_loader import load as load_of_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_of_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ckptkit
from ckptkit.errors import PeerError, StrategyError, UsageError
from ckptkit.live import Checkpointer, load, save
from tests.live.pool import Pool

# Of each tensor: its mesh, the names of that, its placements and its shape.
Spread = tuple[Sequence[int], Sequence[str], Sequence[Any], Sequence[int]]

KINDS: dict[str, list[Spread]] = {
    "fsdp:4": [((4,), (), [Shard(0)], (8, 3))],
    "fsdp:4 ": [((4,), ("fsdp",), [Shard(0)], (8, 3))],
    "dp=fsdp:4": [((4,), ("dp",), [Shard(0)], (8, 3))],
    "tp:4": [((4,), (), [Shard(1)], (8, 4))],
    "ddp:4": [((4,), (), [Replicate()], (8, 3))],
    "dp_replicate=ddp:2,dp_shard=fsdp:2": [
        ((2, 2), ("dp_replicate", "dp_shard"), [Replicate(), Shard(0)], (8, 3))
    ],
    "fsdp:2,tp:2": [((2, 2), (), [Shard(0), Shard(1)], (8, 4))],
    "efsdp=fsdp:2,ep:2": [
        ((4,), ("fsdp",), [Shard(0)], (8, 3)),
        ((2, 2), ("efsdp", "ep"), [Shard(1), Shard(0)], (4, 6)),
    ],
    # Rows that do not go evenly into the ranks: 13 are 4, 4, 4, 1 on four ranks.
    "efsdp=fsdp:2,ep:2 ": [
        ((4,), ("fsdp",), [Shard(0)], (13, 3)),
        ((2, 2), ("efsdp", "ep"), [_StridedShard(0, split_factor=2), Shard(0)], (13, 6)),
    ],
    # Packed projections: gate and up, each cut for itself, the second unevenly.
    "tp:4 ": [
        ((4,), ("tp",), [_StridedShard(0, split_factor=2)], (16, 3)),
        ((4,), ("tp",), [_StridedShard(1, split_factor=2)], (3, 10)),
    ],
    # Dense ones that tp cuts first, and then all others: no axes can say that but in blocks.
    "efsdp=fsdp:2,ep:2,tp:2": [
        ((4, 2), ("fsdp", "tp"), [_StridedShard(0, split_factor=2), Shard(0)], (16, 3)),
        ((4, 2), ("fsdp", "tp"), [_StridedShard(0, split_factor=2), Shard(0)], (19, 3)),
        ((2, 4), ("efsdp", "ep"), [Shard(1), Shard(0)], (8, 6)),
    ],
}


class Meshes:
    """The meshes of a job, each made once: to make one is to connect its ranks anew, and none of
    them goes on while others still do.
    """

    def __init__(self) -> None:
        self._known: dict[str, DeviceMesh] = {}

    def of(self, ranks: Any, names: Sequence[str] = ()) -> DeviceMesh:
        """The mesh of some ranks in order, with names for its dims."""
        key = f"{ranks} {names}"
        if key not in self._known:
            self._known[key] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names) or None)
            dist.barrier()
        return self._known[key]


def spread(described: Sequence[Spread], meshes: Meshes, factor: int) -> dict[str, DTensor]:
    """The tensors, which hold different numbers for each factor."""
    found = {}
    for number, (sizes, names, placements, shape) in enumerate(described):
        mesh = meshes.of(torch.arange(dist.get_world_size()).reshape(tuple(sizes)), names)
        whole = factor * torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(tuple(shape))
        found[str(number)] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return found


def written_and_read(location: str, described: Sequence[Spread], strategy: str) -> None:
    """Into the same job, as it was saved and from one process."""
    meshes = Meshes()
    wanted = spread(described, meshes, factor=3)
    save(f"{location}/own", step=1, state={"app": wanted})
    if dist.get_rank() == 0:
        for to in OTHERS:
            ckptkit.reshard(
                f"{location}/own",
                f"{location}/{to}",
                to=to,
                expect=strategy,
                replicate_unknown=True,
            )
    dist.barrier()
    for step in ("own", *OTHERS):
        state = spread(described, meshes, factor=0)
        load(f"{location}/{step}", state={"app": state})
        for name, tensor in state.items():
            assert torch.equal(tensor.to_local(), wanted[name].to_local()), (step, name)


OTHERS = ("single", "fsdp:3", "ddp:2", "ddp:2,fsdp:2")


@pytest.mark.parametrize("strategy", KINDS)
def test_an_axis_is_of_the_kind_that_its_name_or_its_cuts_say(
    gloo: Pool, tmp_path: Path, strategy: str
) -> None:
    described, ranks = KINDS[strategy], 8 if strategy.count(",") == 2 else 4
    gloo.run(ranks, written_and_read, str(tmp_path), described, strategy.strip())
    for location in (tmp_path / "own", *(tmp_path / to for to in OTHERS)):
        assert not ckptkit.verify(location)
        with ckptkit.open(location) as step:
            for number, (*_, shape) in enumerate(described):
                whole = 3 * torch.arange(1.0, 1.0 + torch.Size(shape).numel())
                assert (step.read(f"app/{number}") == whole.reshape(tuple(shape)).numpy()).all()


def dcp_agrees(location: str) -> None:
    """DTensors of meshes in any order are saved and filled as torch's own checkpoints do."""
    whole = torch.arange(42.0).reshape(7, 6)
    state: dict[str, DTensor] = {}
    meshes = Meshes()
    for ranks, placements in PERMUTED:
        value = whole + len(state)
        spread = distribute_tensor(value, meshes.of(ranks), placements, src_data_rank=None)
        state[str(len(state))] = spread
    dcp = f"{location}/dcp"
    save_of_dcp({"app": state}, checkpoint_id=dcp)
    save(f"{location}/own", step=1, state={"app": state})
    kept = {name: tensor.to_local().clone() for name, tensor in state.items()}
    for read in (load, lambda _, *, state: load_of_dcp(state, checkpoint_id=dcp)):
        for tensor in state.values():
            tensor.to_local().fill_(-1)
        read(f"{location}/own", state={"app": state})
        for name, tensor in state.items():
            assert torch.equal(tensor.to_local(), kept[name]), name
            assert torch.equal(tensor.full_tensor(), whole + int(name))
    plain = {name: torch.empty_like(whole) for name in state}
    load_of_dcp({"app": plain}, checkpoint_id=dcp)
    assert all(torch.equal(tensor, whole + int(name)) for name, tensor in plain.items())


# Ranks go upwards along all dims that cut.
PERMUTED: list[tuple[Any, list[Any]]] = [
    ([[0, 2], [1, 3]], [Shard(0), Shard(1)]),
    ([[0, 2], [1, 3]], [Shard(0), Shard(0)]),
    ([[0, 2], [1, 3]], [_StridedShard(0, split_factor=2), Shard(0)]),
    ([[1, 0], [3, 2]], [Shard(0), Replicate()]),
    ([[2, 0], [3, 1]], [Shard(1), Replicate()]),
    ([[2, 3], [0, 1]], [Replicate(), Shard(1)]),
    ([3, 2, 1, 0], [Replicate()]),
]


def test_a_dtensor_lies_as_dcp_says_whatever_the_order_of_its_mesh(
    gloo: Pool, tmp_path: Path
) -> None:
    gloo.run(4, dcp_agrees, str(tmp_path))
    ckptkit.reshard(tmp_path / "own", tmp_path / "one", to="single")
    for location in (tmp_path / "own", tmp_path / "one"):
        with ckptkit.open(location) as step:
            for number in range(len(PERMUTED)):
                whole = torch.arange(42.0).reshape(7, 6).numpy() + number
                assert (step.read(f"app/{number}") == whole).all()


def by_hand_and_downwards(location: str, ranks: Any, placements: list[Any]) -> None:
    mesh = DeviceMesh("cpu", ranks)
    value = torch.arange(16.0).reshape(4, 4)
    # What torch gathers here is not what it has cut, but what it has scattered; DCP saves the one
    # as the other: nobody knows which of the two a tensor is.
    cut = distribute_tensor(value, mesh, placements, src_data_rank=None)
    scattered = distribute_tensor(value, mesh, placements)
    assert torch.equal(scattered.full_tensor(), value)
    assert not torch.equal(cut.full_tensor(), value)
    with pytest.raises((StrategyError, PeerError), match="ranks that do not go upwards"):
        save(location, step=1, state={"app": {"x": cut}})


@pytest.mark.parametrize(
    ("ranks", "placements"),
    [
        ([3, 2, 1, 0], [Shard(0)]),
        ([[1, 0], [3, 2]], [Replicate(), Shard(0)]),
        ([[2, 3], [0, 1]], [Shard(0), Shard(1)]),
    ],
)
def test_a_cut_on_which_torch_contradicts_itself_is_refused(
    gloo: Pool, tmp_path: Path, ranks: Any, placements: list[Any]
) -> None:
    gloo.run(4, by_hand_and_downwards, str(tmp_path), ranks, placements)
    assert not any(tmp_path.iterdir())


def unevenly(location: str) -> None:
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with pytest.raises((StrategyError, PeerError), match="numbered row by row, as"):
        save(location, step=1, model=model)


def test_a_mesh_of_uneven_lines_is_refused_with_what_to_do(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, unevenly, str(tmp_path))
    assert not any(tmp_path.iterdir())


def named_downwards(location: str) -> None:
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("fsdp",))
    model = nn.Linear(4, 4)
    with Checkpointer(location, mesh=mesh) as checkpointer:
        # Nobody knows whether what is cut by hand goes by the ranks or by the mesh.
        with pytest.raises((StrategyError, PeerError), match="ranks that do not go upwards"):
            checkpointer.save(1, model=model)
        fully_shard(model, mesh=mesh)
        checkpointer.save(2, model=model)
    wanted = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    for name, whole in zip(("weight", "bias"), wanted, strict=True):
        with ckptkit.open(location) as step:
            assert (step.read(f"model/{name}") == whole.detach().numpy()).all()


def test_a_mesh_that_goes_downwards_may_name_what_fully_shard_cuts(
    gloo: Pool, tmp_path: Path
) -> None:
    gloo.run(2, named_downwards, str(tmp_path))


def composed(location: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "tp"))
    torch.manual_seed(0)  # replicas begin alike
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    whole = cast("DTensor", model[0].weight).full_tensor()
    replicate(model, device_mesh=mesh["ddp"])
    for step in (1, 2):
        save(location, step=step, model=model)
        model(torch.ones(1, 4))  # from here on the weight is no parameter of its module
    with ckptkit.open(location) as found:
        assert str(found.strategy) == "ddp:2,tp:2"
        assert (found.read("model/0.weight") == whole.detach().numpy()).all()
    weight = cast("DTensor", model[0].weight).to_local().detach()
    kept = weight.clone()
    weight.fill_(-1)
    load(location, model=model)
    assert torch.equal(weight, kept)


def test_the_older_replicate_hides_no_dtensor(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, composed, str(tmp_path))


def heads(seed: int) -> tuple[nn.Module, AdamW]:
    """Two of one row, which only the first rank of `tp` has, under DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "tp"))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"0": whole, "1": whole})
    wrapped = DistributedDataParallel(model, device_mesh=mesh["ddp"])
    optimizer = AdamW(wrapped.parameters())
    # From here on the weights are no parameters of their modules.
    wrapped(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return wrapped, optimizer


def empty_under_ddp(location: str) -> None:
    model, optimizer = heads(0)
    save(location, step=1, model=model, optimizer=optimizer)
    with ckptkit.open(location) as found:
        assert {"model/0.weight", "optimizer/1.weight/exp_avg"} < set(found.arrays)
    again, other = heads(1)
    load(location, model=again, optimizer=other)
    for mine, its in zip(optimizer.param_groups, other.param_groups, strict=True):
        for first, second in zip(mine["params"], its["params"], strict=True):
            assert torch.equal(first, second)
            assert torch.equal(optimizer.state[first]["exp_avg"], other.state[second]["exp_avg"])


def test_empty_shards_that_ddp_wraps_are_told_apart(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, empty_under_ddp, str(tmp_path))


def too_early(location: str, *, alone: bool) -> None:
    """Made without a job, or in an earlier one whose ranks had other numbers."""
    rank, size, store = (
        dist.get_rank(),
        dist.get_world_size(),
        dist.distributed_c10d._get_default_store(),
    )
    if alone:
        dist.destroy_process_group()
    with Checkpointer(location) as checkpointer:
        if not alone:
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=PrefixStore("again", store), rank=size - 1 - rank, world_size=size
        )
        mesh = init_device_mesh("cpu", (size,))
        state = {"x": distribute_tensor(torch.arange(4), mesh, [Shard(0)])}
        with pytest.raises(UsageError, match="made before init_process_group"):
            checkpointer.save(1, state={"app": state})
        with pytest.raises(UsageError, match="made before init_process_group"):
            checkpointer.restore(state={"app": state})


@pytest.mark.parametrize("alone", [True, False])
def test_a_checkpointer_that_is_older_than_its_job_says_so(
    gloo: Pool, tmp_path: Path, alone: bool
) -> None:
    gloo.run(2, partial(too_early, alone=alone), str(tmp_path))
    assert not any(tmp_path.iterdir())
