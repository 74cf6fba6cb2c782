"""`as_distributed`: from a model and a text to a model spread over the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import PeerError, StrategyError, UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.communication.starting import init
from ckptkit.parallel.strategies import replicated, sharded, tensor_parallel
from ckptkit.parallel.strategies.distributed import Distributed
from ckptkit.parallel.strategies.options import (
    Options,
    Precision,
    Split,
    balance_of,
    group_size,
    microbatches_of,
    precision_of,
    schedule_of,
)
from ckptkit.parallel.strategies.pipeline import Pipeline
from ckptkit.parallel.strategies.spec import mesh_names, resolved, sharder_of
from ckptkit.parallel.strategies.stages import stages_of
from ckptkit.parallel.strategies.stepping import MakeOptimizer, check_optimizer, made_for

# Where a module keeps the Distributed that it became.
_MARK = "_ckptkit_distributed"
_SYNC_BYTES = 250 * 2**20


def as_distributed(  # noqa: PLR0913 — everything that strategies leave open, all with defaults
    model: nn.Module | Distributed,
    spec: str | Strategy,
    *,
    optimizer: Optimizer | MakeOptimizer | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    mixed_precision: Precision | str | None = None,
    offload: bool = False,
    group_below: int | str = "1MiB",
    microbatches: int | None = None,
    schedule: str | None = None,
    balance: str = "parameters",
    example: Any = None,
    split: Split | None = None,
    compression: str | None = None,
    device: torch.device | str | None = None,
) -> Distributed:
    """Spread a model over the ranks of the job as a text such as `fsdp` or `pp:2,tp:2,fsdp:2` says.

    Every rank calls it alike, with the whole model; values are those of rank 0. The model given is
    taken over. Calling it again with what it made and the same strategy returns the same.
    """
    if spec != "single":
        _join()
    world = dist.get_world_size() if dist.is_initialized() else 1
    strategy = resolved(spec, world)
    known = model if isinstance(model, Distributed) else vars(model).get(_MARK)
    if known is not None:
        return _same(known, strategy, optimizer)
    name, stages = schedule_of(schedule)
    options = Options(
        group_size(group_below),
        precision_of(mixed_precision),
        offload=offload,
        compression=compression,
        rules="auto" if rules is None else rules,
        sizes=dict(sizes or {}),
        microbatches=microbatches_of(microbatches, strategy, name),
        schedule=name,
        stages_per_rank=stages,
        balance=balance_of(balance),
        example=example,
        split=split,
    )
    assert isinstance(model, nn.Module)  # noqa: S101 — no Distributed is left
    options.check(strategy)
    _check_plain(model)
    settings = dict(optimizer_options or {})
    check_optimizer(model, optimizer, settings, strategy)
    made = _Spreading(model, strategy, options, _device(device)).run(optimizer, settings)
    for module in (model, *made.modules):
        vars(module)[_MARK] = made
    return made


class _Spreading:
    """One model on its way from one process to all."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, options: Options, device: torch.device
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._options = options
        self._device = device
        self._ranks = {axis.kind: axis.size for axis in strategy.mesh.axes}
        self._mesh = self._device_mesh()

    def run(
        self, optimizer: Optimizer | MakeOptimizer | None, settings: Mapping[str, Any]
    ) -> Distributed:
        """Cut it into stages, cut these by rules, then by data parallelism, and step the rest."""
        _check_same_model(self._model, self._strategy)
        tp, options = self._ranks.get("tp", 1), self._options
        plan = tensor_parallel.plan_of(self._model, tp, options) if tp > 1 else {}
        self._align()
        modules = [self._model]
        numbers = self._stage_numbers()
        count = self._ranks.get("pp", 1) * options.stages_per_rank
        if numbers is not None:
            modules = stages_of(self._model, count, numbers, options)
        modules = [self._spread(module.to(self._device), plan) for module in modules]
        compression = self._compressed(modules)
        pipeline = None
        if numbers is not None:
            group = self._axis("pp").get_group()
            pipeline = Pipeline(modules, numbers, count, options, self._device, group)
        return Distributed(
            self._strategy,
            modules,
            mesh=self._mesh,
            device=self._device,
            optimizer=self._stepping(modules, optimizer, settings),
            pipeline=pipeline,
            accumulate=1 if pipeline else options.microbatches,
            compression=compression,
        )

    def _device_mesh(self) -> DeviceMesh | None:
        axes = self._strategy.mesh.axes
        if not axes:
            return None
        return init_device_mesh(
            self._device.type,
            tuple(axis.size for axis in axes),
            mesh_dim_names=tuple(mesh_names(self._strategy).values()),
        )

    def _axis(self, *kinds: str) -> DeviceMesh:
        """The part of the mesh along the axes of these kinds that there are."""
        assert self._mesh is not None  # noqa: S101 — there is one where there are axes
        names = mesh_names(self._strategy)
        found = tuple(names[kind] for kind in kinds if kind in names)
        return self._mesh[found[0] if len(found) == 1 else found]

    def _align(self) -> None:
        """Give all ranks the values of rank 0, where no wrapper does."""
        is_meta = any(p.is_meta for p in self._model.parameters())
        if self._strategy.world_size == 1 or is_meta or set(self._ranks) <= {"ddp", "zero1"}:
            return
        self._model.to(self._device)
        group = cast("dist.ProcessGroup", dist.group.WORLD)
        _sync_module_states(self._model, group, _SYNC_BYTES, 0, (), broadcast_buffers=True)

    def _stage_numbers(self) -> list[int] | None:
        """The stages of this rank, in a pipeline of more than one."""
        if self._ranks.get("pp", 1) == 1:
            return None
        at, ranks = self._axis("pp").get_local_rank(), self._ranks["pp"]
        return [at + ranks * turn for turn in range(self._options.stages_per_rank)]

    def _spread(self, module: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
        strategy, options = self._strategy, self._options
        sharder, is_stage = sharder_of(strategy), self._ranks.get("pp", 1) > 1
        if not sharder and isinstance(options.precision, torch.dtype):
            cast_ = torch.autocast(self._device.type, options.precision)
            vars(module)["forward"] = cast_(module.forward)
        if plan:
            tensor_parallel.parallelize(module, self._axis("tp"), plan)
        if sharder:
            mesh = self._axis("ddp", sharder)
            sharded.shard(module, mesh, options, keep_gathered=sharder == "zero2")
        elif "ddp" in self._ranks and (plan or (is_stage and options.compression is None)):
            sharded.repeat(module, self._axis("ddp"), options)
        elif "ddp" in self._ranks or "zero1" in self._ranks:
            group = self._axis("ddp", "zero1").get_group()
            module = replicated.wrap(module, group, self._device, is_stage=is_stage)
        return module

    def _compressed(self, modules: list[nn.Module]) -> Any:
        if self._options.compression is None:
            return None
        from ckptkit.parallel.optimizers.compression import compression_of  # noqa: PLC0415

        compression = compression_of(self._options.compression)
        for module in modules:
            compression.attach(cast("DistributedDataParallel", module))
        return compression

    def _stepping(
        self,
        modules: list[nn.Module],
        optimizer: Optimizer | MakeOptimizer | None,
        settings: Mapping[str, Any],
    ) -> Optimizer | None:
        if optimizer is None:
            return None
        group = self._axis("zero1").get_group() if "zero1" in self._ranks else None
        parameters = dict.fromkeys(p for module in modules for p in module.parameters())
        return made_for(parameters, optimizer, settings, group)


def _same(
    known: Distributed, strategy: Strategy, optimizer: Optimizer | MakeOptimizer | None
) -> Distributed:
    if known.strategy != strategy:
        raise StrategyError(
            f"the model is spread as {known.strategy} already",
            value=str(strategy),
            hint="make the model anew, spread that, and load a checkpoint of this one",
        )
    if isinstance(optimizer, Optimizer) and optimizer is not known.optimizer:
        raise UsageError("the model has another optimizer already", value=type(optimizer).__name__)
    return known


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that something else has spread or wrapped."""
    wrapped = next(
        (m for m in model.modules() if isinstance(m, (DistributedDataParallel, FSDPModule))), None
    )
    tensor = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if wrapped is not None or tensor is not None:
        raise UsageError(
            "the model is spread already",
            value=type(model if wrapped is None else wrapped).__name__,
            hint="pass the plain model",
        )


def _check_same_model(model: nn.Module, strategy: Strategy) -> None:
    """Raise on all ranks when one has another model or strategy: they would wait for ever."""
    if strategy.world_size == 1 or not dist.is_initialized():
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine = (str(strategy), [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors])
    heard: list[Any] = [None] * strategy.world_size
    dist.all_gather_object(heard, mine)
    for rank, theirs in enumerate(heard):
        if theirs[0] != heard[0][0]:
            raise PeerError(f"rank {rank} has another strategy than rank 0", value=theirs[0])
        if theirs != heard[0]:
            differing = [b for a, b in zip(heard[0][1], theirs[1], strict=False) if a != b]
            raise PeerError(f"rank {rank} has another model than rank 0", value=differing[:3])


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    if torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join() -> None:
    """Make this process a rank of the job that its environment tells of, or one alone."""
    if dist.is_initialized():
        return
    ranks = init().world_size
    if not dist.is_initialized():
        raise UsageError(
            "these ranks have no process group of torch's, which its engines need",
            value=f"{ranks} ranks in memory",
            hint="use gloo, nccl or mpi: ckptkit.parallel.init()",
        )
