"""The same small training job under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as composable_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tests.live.network import DEVICE, PARTS, Block, Network, batch, loss_of, network

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]


def adamw(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The default; parameter by parameter, as those of two meshes cannot go together."""
    return AdamW(parameters, lr=0.03, foreach=False)


@dataclass(slots=True)
class Job:
    """One rank of a training job."""

    model: Any
    """What is passed to ckptkit: a module, a stage, a schedule, or a list of stages."""
    modules: list[nn.Module]
    optimizer: Optimizer
    replica: int = 0
    replicas: int = 1
    """Which of how many slices of every batch this rank trains on."""
    schedule: Any = None
    stages: list[PipelineStage] = field(default_factory=list)

    def train(self, steps: Sequence[int]) -> list[float]:
        """The losses of some steps, of the whole batch."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        inputs, targets = (t.chunk(self.replicas)[self.replica] for t in batch(step))
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self.schedule is None:
            losses.append(loss_of(self.modules[0](inputs), targets))
            losses[0].backward()
        else:
            first = [inputs] if any(stage.is_first for stage in self.stages) else []
            is_last = any(stage.is_last for stage in self.stages)
            self.schedule.step(*first, target=targets if is_last else None, losses=losses)
        self.optimizer.step()
        said = [sum(map(float, losses)), float(len(losses))]
        both = torch.tensor(said, dtype=torch.float64, device=DEVICE)
        dist.all_reduce(both)
        return float(both[0] / both[1])


def plain(seed: int, make: MakeOptimizer) -> Job:
    """No wrapper at all."""
    model = network(seed)
    return Job(model, [model], make(list(model.parameters())))


def ddp(seed: int, make: MakeOptimizer) -> Job:
    """`DistributedDataParallel`."""
    return _replicated(DistributedDataParallel(network(seed)), make)


def zero1(seed: int, make: MakeOptimizer) -> Job:
    """DDP, with the state of the optimizer shared out."""
    model = DistributedDataParallel(network(seed))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), cast("Any", make))
    return Job(model, [model], optimizer, dist.get_rank(), dist.get_world_size())


def fsdp2(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard`."""
    return _replicated(_fully_sharded(network(seed)), make)


def zero2(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard` whose parameters stay gathered between forward and backward."""
    return _replicated(_fully_sharded(network(seed), reshard_after_forward=False), make)


def hsdp(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard` over pairs of ranks that repeat each other."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _replicated(_fully_sharded(network(seed), mesh), make)


def fsdp2_reversed(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard` over a mesh that numbers the ranks downwards, which its groups do not."""
    mesh = DeviceMesh(DEVICE, [3, 2, 1, 0], mesh_dim_names=("fsdp",))
    return _replicated(_fully_sharded(network(seed), mesh), make)


def fsdp1(seed: int, make: MakeOptimizer) -> Job:
    """`FullyShardedDataParallel`, parameters as views of the flat ones."""
    return _fsdp1(seed, make, ShardingStrategy.FULL_SHARD)


def fsdp1_flat(seed: int, make: MakeOptimizer) -> Job:
    """`FullyShardedDataParallel` that shows its flat parameters."""
    return _fsdp1(seed, make, ShardingStrategy.FULL_SHARD, use_orig_params=False)


def fsdp1_grad_op(seed: int, make: MakeOptimizer) -> Job:
    """FSDP1 whose parameters stay gathered between forward and backward."""
    return _fsdp1(seed, make, ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_hybrid(seed: int, make: MakeOptimizer) -> Job:
    """FSDP1 over pairs of ranks that repeat each other."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp1(seed, make, ShardingStrategy.HYBRID_SHARD, mesh)


def fsdp1_tp(seed: int, make: MakeOptimizer) -> Job:
    """FSDP1 of what tensor parallelism has cut already."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("fsdp", "tp"))
    return _fsdp1(seed, make, ShardingStrategy.FULL_SHARD, mesh["fsdp"], mesh["tp"])


def fsdp1_flat_tp(seed: int, make: MakeOptimizer) -> Job:
    """The same with flat parameters, and tensor parallelism between ranks that are far apart."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("tp", "fsdp"))
    strategy = ShardingStrategy.FULL_SHARD
    return _fsdp1(seed, make, strategy, mesh["fsdp"], mesh["tp"], use_orig_params=False)


def fsdp1_hybrid_tp(seed: int, make: MakeOptimizer) -> Job:
    """The same on eight ranks, four of which repeat the others."""
    mesh = init_device_mesh(DEVICE, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    strategy, both = ShardingStrategy.HYBRID_SHARD, mesh["replicate", "shard"]
    return _fsdp1(seed, make, strategy, both, mesh["tp"])


def tp(seed: int, make: MakeOptimizer) -> Job:
    """`parallelize_module`."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _tensor_parallel(network(seed), mesh)
    return Job(model, [model], make(list(model.parameters())))


def fsdp_tp(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard` of what tensor parallelism has cut already."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = _fully_sharded(_tensor_parallel(network(seed), mesh["tp"]), mesh["fsdp"])
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("fsdp"), 2)


def experts(seed: int, make: MakeOptimizer) -> Job:
    """Fully sharded over all ranks, but for what is cut as experts are, over a mesh of its own."""
    mesh, flat = _expert_meshes()
    model = network(seed)
    _cut_experts(model, mesh["ep"], mesh["efsdp"])
    model = _fully_sharded(model, flat)
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("efsdp"), 2)


def meshes_of_parameters(seed: int, make: MakeOptimizer) -> Job:
    """`fully_shard` with a mesh of its own for some parameters of a module."""
    mesh, flat = _expert_meshes()
    model = network(seed)
    few = common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    for layer in model.layers.values():
        parts = cast("list[nn.Module]", [layer.up, layer.down])
        own = {parameter for part in parts for parameter in part.parameters()}

        def place(parameter: nn.Parameter, own: set[nn.Parameter] = own) -> Any:
            return common.ShardPlacementResult(Shard(0), few) if parameter in own else None

        fully_shard(layer, mesh=flat, shard_placement_fn=place)
    fully_shard(model, mesh=flat)
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("efsdp"), 2)


def _expert_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("efsdp", "ep"))
    return mesh, mesh._flatten("fsdp")


def ddp_tp(seed: int, make: MakeOptimizer) -> Job:
    """Replicas of a model that tensor parallelism has cut."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("ddp", "tp"))
    model = _tensor_parallel(network(seed), mesh["tp"])
    _average_gradients(model, mesh.get_group("ddp"))
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("ddp"), 2)


def ddp_of_tp(seed: int, make: MakeOptimizer) -> Job:
    """`DistributedDataParallel` around DTensors."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("ddp", "tp"))
    model = DistributedDataParallel(
        _tensor_parallel(network(seed), mesh["tp"]), device_mesh=mesh["ddp"]
    )
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("ddp"), 2)


def composable(seed: int, make: MakeOptimizer) -> Job:
    """The older `replicate`, which is DDP beside the modules."""
    return _replicated(composable_replicate(network(seed)), make)


def replicate_of_tp(seed: int, make: MakeOptimizer) -> Job:
    """`replicate` of what tensor parallelism has cut."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("ddp", "tp"))
    model = _tensor_parallel(network(seed), mesh["tp"])
    replicate(model, mesh=mesh["ddp"])
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("ddp"), 2)


def ddp_of_tp_permuted(seed: int, make: MakeOptimizer) -> Job:
    """Tensor parallelism of ranks that are far apart, with replicas that go downwards."""
    mesh = DeviceMesh(DEVICE, [[1, 3], [0, 2]], mesh_dim_names=("ddp", "tp"))
    model = _tensor_parallel(network(seed), mesh["tp"])
    _average_gradients(model, mesh.get_group("ddp"))
    return Job(model, [model], make(list(model.parameters())), mesh.get_local_rank("ddp"), 2)


def pp(seed: int, make: MakeOptimizer) -> Job:
    """A pipeline of one stage on each rank."""
    return _pipeline(seed, make, dist.get_rank(), dist.get_world_size())


def pp_twice(seed: int, make: MakeOptimizer) -> Job:
    """A pipeline of two stages on each rank."""
    stages = 2 * dist.get_world_size()
    parts = [(part,) for part in PARTS]
    mine = range(dist.get_rank(), stages, dist.get_world_size())
    made = [_stage(network(seed).keep(parts[number]), number, stages) for number in mine]
    schedule = ScheduleInterleaved1F1B([*made], stages, loss_of)
    return _piped(made, schedule, make)


def pp_fsdp(seed: int, make: MakeOptimizer) -> Job:
    """Stages that are fully sharded."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "fsdp"))
    return _pipeline(seed, make, mesh.get_local_rank("pp"), 2, mesh)


def pp_fsdp_tp(seed: int, make: MakeOptimizer) -> Job:
    """All of it at once, on four ranks or eight."""
    shape = (2, dist.get_world_size() // 4, 2)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("pp", "fsdp", "tp"))
    return _pipeline(seed, make, mesh.get_local_rank("pp"), 2, mesh)


def pp_experts(seed: int, make: MakeOptimizer) -> Job:
    """Experts in the last stage of a pipeline only: on four ranks beside what nothing cuts, on
    eight beside what is fully sharded, over a mesh of their own.
    """
    replicas = dist.get_world_size() // 4
    mesh = init_device_mesh(DEVICE, (2, replicas, 2), mesh_dim_names=("pp", "efsdp", "ep"))
    stage = mesh.get_local_rank("pp")
    model = network(seed).keep((PARTS[:2], PARTS[2:])[stage])
    if stage == 1:
        _cut_experts(model, mesh["ep"], mesh["efsdp"] if replicas > 1 else None)
    if replicas > 1:
        _fully_sharded(model, mesh["efsdp", "ep"]._flatten("fsdp"))
    made = [_stage(model, stage, 2, mesh.get_group("pp"))]
    job = _piped(made, ScheduleGPipe(made[0], 2, loss_of), make)
    job.replica, job.replicas = mesh.get_local_rank("efsdp"), replicas
    return job


def _cut_experts(model: Network, ep: DeviceMesh, efsdp: DeviceMesh | None) -> None:
    for layer in model.layers.values():
        plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, ep, plan)
        for part in (layer.up, layer.down) if efsdp is not None else ():
            fully_shard(cast("nn.Module", part), mesh=efsdp)


def _replicated(model: nn.Module, make: MakeOptimizer) -> Job:
    optimizer = make(list(model.parameters()))
    return Job(model, [model], optimizer, dist.get_rank(), dist.get_world_size())


def _fsdp1(
    seed: int,
    make: MakeOptimizer,
    strategy: ShardingStrategy,
    mesh: DeviceMesh | None = None,
    tp: DeviceMesh | None = None,
    *,
    use_orig_params: bool = True,
) -> Job:
    model = network(seed) if tp is None else _tensor_parallel(network(seed), tp)
    wrapped = _wrapped(model, mesh, sharding_strategy=strategy, use_orig_params=use_orig_params)
    job = _replicated(wrapped, make)
    if mesh is not None:
        job.replica, job.replicas = int((mesh.mesh < dist.get_rank()).sum()), mesh.size()
    return job


def _wrapped(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(DEVICE),
        **{"use_orig_params": True, **options},
    )


def _fully_sharded(
    model: Network, mesh: DeviceMesh | None = None, *, reshard_after_forward: bool | None = None
) -> Network:
    for part in (model.embed, *model.layers.values(), model):
        if part is not None:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def _tensor_parallel(model: Network, mesh: DeviceMesh) -> Network:
    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    for number in model.layers:
        plan[f"layers.{number}.norm"] = SequenceParallel()
        plan[f"layers.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    return model


def _average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What DDP does, which does not take DTensors as they are."""

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        dist.all_reduce(local, group=group)
        local /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def _pipeline(
    seed: int, make: MakeOptimizer, stage: int, stages: int, mesh: DeviceMesh | None = None
) -> Job:
    parts = {2: (PARTS[:2], PARTS[2:]), 3: (PARTS[:2], PARTS[2:3], PARTS[3:])}
    mine = parts[stages][stage] if stages in parts else (PARTS[stage],)
    model = network(seed).keep(mine)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and "tp" in names:
        _tensor_parallel(model, mesh["tp"])
    replica, replicas = 0, 1
    if mesh is not None:
        _fully_sharded(model, mesh["fsdp"])
        replica, replicas = mesh.get_local_rank("fsdp"), mesh["fsdp"].size()
    made = [_stage(model, stage, stages, None if mesh is None else mesh.get_group("pp"))]
    job = _piped(made, ScheduleGPipe(made[0], 2, loss_of), make)
    job.replica, job.replicas = replica, replicas
    return job


def _stage(
    model: nn.Module, number: int, stages: int, group: dist.ProcessGroup | None = None
) -> PipelineStage:
    return PipelineStage(model, number, stages, torch.device(DEVICE), group=group)


def _piped(stages: list[PipelineStage], schedule: object, make: MakeOptimizer) -> Job:
    modules = [stage.submod for stage in stages]
    optimizer = make([p for module in modules for p in module.parameters()])
    return Job(schedule, modules, optimizer, schedule=schedule, stages=stages)


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy on some number of ranks."""

    ranks: int
    written: str
    """What the manifest says of it."""
    build: Callable[[int, MakeOptimizer], Job]


_FSDP1 = {
    "fsdp1:2": Layout(2, "fsdp:2", fsdp1),
    "fsdp1:3": Layout(3, "fsdp:3", fsdp1),
    "fsdp1:2, flat": Layout(2, "fsdp:2", fsdp1_flat),
    "fsdp1:2, grad op": Layout(2, "fsdp:2", fsdp1_grad_op),
    "fsdp1:2, tp:2": Layout(4, "fsdp:2,tp:2", fsdp1_tp),
    "fsdp1:2x2": Layout(4, "replicate=ddp:2,shard=fsdp:2", fsdp1_hybrid),
}

LAYOUTS = {
    "plain": Layout(1, "single", plain),
    "ddp:1": Layout(1, "ddp:1", ddp),
    "ddp:2": Layout(2, "ddp:2", ddp),
    "ddp:3": Layout(3, "ddp:3", ddp),
    "fsdp2:1": Layout(1, "fsdp:1", fsdp2),
    "fsdp2:2": Layout(2, "fsdp:2", fsdp2),
    "fsdp2:3": Layout(3, "fsdp:3", fsdp2),
    "fsdp2:4": Layout(4, "fsdp:4", fsdp2),
    "fsdp2:4, reversed": Layout(4, "fsdp:4", fsdp2_reversed),
    "hsdp:2x2": Layout(4, "replicate=ddp:2,shard=fsdp:2", hsdp),
    "zero1:2": Layout(2, "zero1:2", zero1),
    "zero1:3": Layout(3, "zero1:3", zero1),
    "zero2:2": Layout(2, "fsdp:2", zero2),
    "tp:2": Layout(2, "tp:2", tp),
    "tp:3": Layout(3, "tp:3", tp),
    "tp:4": Layout(4, "tp:4", tp),
    "fsdp:2,tp:2": Layout(4, "fsdp:2,tp:2", fsdp_tp),
    "fsdp:4, experts on ep:2": Layout(4, "efsdp=fsdp:2,ep:2", experts),
    "fsdp:4, parameters on fsdp:2": Layout(4, "efsdp=fsdp:2,ep:2", meshes_of_parameters),
    "ddp:2,tp:2": Layout(4, "ddp:2,tp:2", ddp_tp),
    "ddp:2 around tp:2": Layout(4, "ddp:2,tp:2", ddp_of_tp),
    "replicate:2 of tp:2": Layout(4, "ddp:2,tp:2", replicate_of_tp),
    "tp:2,ddp:2 over a permuted mesh": Layout(4, "tp:2,ddp:2", ddp_of_tp_permuted),
    "pp:2": Layout(2, "pp:2", pp),
    "pp:3": Layout(3, "pp:3", pp),
    "pp:4": Layout(4, "pp:4", pp),
    "pp:2, two stages each": Layout(2, "pp:2", pp_twice),
    "pp:2,fsdp:2": Layout(4, "pp:2,fsdp:2", pp_fsdp),
    "pp:2,fsdp:1,tp:2": Layout(4, "pp:2,tp:2,fsdp:1", pp_fsdp_tp),
    **_FSDP1,
}

if not hasattr(common, "ShardPlacementResult"):  # before torch 2.13
    del LAYOUTS["fsdp:4, parameters on fsdp:2"]


def all_but(rest: set[str]) -> list[Any]:
    """All layouts for `parametrize`, the rest in long tests only."""
    long = pytest.mark.long
    return [pytest.param(layout, marks=long if layout in rest else ()) for layout in LAYOUTS]


# Differ only in the number of ranks from one that stays, and are for long tests.
LIKE_OTHERS = {
    "ddp:2",
    "fsdp2:2",
    "fsdp2:4",
    "zero1:2",
    "tp:2",
    "tp:4",
    "pp:2",
    "pp:4",
    "fsdp1:2",
}
EACH_LAYOUT = all_but(LIKE_OTHERS)
# What these do to one parameter, others do; test_matrix.py saves and loads with each of them.
MADE_OF_OTHERS = LIKE_OTHERS | {
    "ddp:1",
    "fsdp2:1",
    "fsdp2:4, reversed",
    "zero2:2",
    "fsdp:4, parameters on fsdp:2",
    "ddp:2,tp:2",
    "tp:2,ddp:2 over a permuted mesh",
    "pp:3",
    "pp:2,fsdp:2",
    "fsdp1:2, grad op",
}
EACH_KIND = all_but(MADE_OF_OTHERS)
# Those of these that run no line of ckptkit which others do not, but to tell how a job is spread:
# what asks for that takes `EACH_KIND`.
FEW_KINDS = all_but(
    MADE_OF_OTHERS | {"hsdp:2x2", "replicate:2 of tp:2", "pp:2,fsdp:1,tp:2", "fsdp1:2x2"}
)


def build(layout: str, seed: int = 0, make: MakeOptimizer = adamw) -> Job:
    """One rank's part of a job."""
    return LAYOUTS[layout].build(seed, make)
