"""`as_distributed`: from a model and a text to a model spread over the job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import OneRank, leaving
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.ranks.job import init
from ckptkit.parallel.strategies import replicated, sharded, tensor_parallel
from ckptkit.parallel.strategies.alike import (
    check_alike,
    described,
    described_options,
    give_random_numbers,
    give_values,
    room,
)
from ckptkit.parallel.strategies.already import Choices, check_same, known_as, remember
from ckptkit.parallel.strategies.distributed import Distributed
from ckptkit.parallel.strategies.dtypes import check_dtypes
from ckptkit.parallel.strategies.grouping import Unit
from ckptkit.parallel.strategies.options import Options, Precision, Split
from ckptkit.parallel.strategies.pipeline import Pipeline, Schedule
from ckptkit.parallel.strategies.spec import mesh_names, resolved, sharder_of
from ckptkit.parallel.strategies.stages import stages_of
from ckptkit.parallel.strategies.stepping import MakeOptimizer, check_optimizer, made_for
from ckptkit.parallel.strategies.tried_out import try_out

log = logging.getLogger("ckptkit.parallel")


def as_distributed(  # noqa: PLR0913 — everything that strategies leave open, all with defaults
    model: nn.Module | Distributed | Schedule,
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
    overlap: bool = False,
    device: torch.device | str | None = None,
) -> Distributed:
    """Spread a model over the ranks of the job as a text such as `fsdp` or `pp:2,tp:2,fsdp:2` says.

    Every rank calls it alike, with the whole model; values are those of rank 0. The model given is
    taken over. Called again with what it made (the Distributed, or its model while that is in use)
    and the same strategy it returns the same, and refuses other choices.
    """
    if spec != "single":
        _join()
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = known_as(model)
    barrier = OneRank() if isinstance(found, Distributed) else room("spread")
    with leaving(barrier):
        strategy = resolved(spec, world)
        options = Options.of(
            strategy,
            rules=rules,
            sizes=sizes,
            mixed_precision=mixed_precision,
            offload=offload,
            group_below=group_below,
            microbatches=microbatches,
            schedule=schedule,
            balance=balance,
            example=example,
            split=split,
            compression=compression,
            overlap=overlap,
        )
        choices = Choices(options, optimizer, dict(optimizer_options or {}))
        if isinstance(found, Distributed):
            check_same(found, strategy, choices)
            return found
        _check(found, strategy, choices)
        check_alike(barrier, _said(found, strategy, choices))
    made = _Spreading(found, strategy, options, device_of(found, device)).run(choices)
    if made.units and dist.get_rank() == 0:
        layers = sum(len(unit.names) for unit in made.units)
        count = len(made.units)
        log.info("%s layers in %s unit%s", f"{layers:,}", f"{count:,}", "s" if count > 1 else "")
    remember(made, choices, (model, made.model, *made.modules))
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
        self._units: list[Unit] = []

    def run(self, choices: Choices) -> Distributed:
        """Cut it into stages, cut these by rules, then by data parallelism, and step the rest."""
        tp, options = self._ranks.get("tp", 1), self._options
        plan = tensor_parallel.plan_of(self._model, tp, options) if tp > 1 else {}
        self._align()
        if plan and options.example is not None:
            try_out(self._model, self._axis("tp"), plan, options.example, self._device)
        modules = [self._model]
        numbers = self._stage_numbers()
        count = self._ranks.get("pp", 1) * options.stages_per_rank
        if numbers is not None:
            modules = stages_of(self._model, count, numbers, options)
        modules = [self._spread(module, plan) for module in modules]
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
            optimizer=self._stepping(modules, choices),
            pipeline=pipeline,
            accumulate=1 if pipeline else options.microbatches,
            compression=compression,
            units=self._units,
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
        """Give all ranks the values of rank 0, where no wrapper does; and those with cut layers the
        same random numbers, for what they all compute.
        """
        if self._ranks.get("tp", 1) > 1:
            give_random_numbers(self._axis("tp").get_group(), self._device)
        if self._strategy.world_size > 1 and not set(self._ranks) <= {"ddp", "zero1"}:
            give_values(self._model, self._device)

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
        if not sharder:
            module = module.to(self._device)  # `fully_shard` does it unit by unit
        if sharder:
            mesh = self._axis("ddp", sharder)
            self._units += sharded.shard(module, mesh, options, keep_gathered=sharder == "zero2")
        elif "ddp" in self._ranks and (plan or (is_stage and options.compression is None)):
            self._units += sharded.repeat(module, self._axis("ddp"), options.group_below)
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
            # Not where nothing is trained.
            if isinstance(module, (DistributedDataParallel, FSDPModule)):
                compression.attach(module)
        return compression

    def _stepping(self, modules: list[nn.Module], choices: Choices) -> Optimizer | None:
        if choices.optimizer is None:
            return None
        group = self._axis("zero1").get_group() if "zero1" in self._ranks else None
        parameters = dict.fromkeys(p for module in modules for p in module.parameters())
        overlapping = modules if self._options.overlap else ()
        # Each stage may have groups of its own.
        barrier = OneRank() if "pp" in self._ranks else room("optimizer")
        with leaving(barrier):
            made = made_for(parameters, choices.optimizer, choices.settings, group, overlapping)
            check_alike(barrier, {"optimizer_options": described_options(made.param_groups)})
        return made


def _check(model: nn.Module, strategy: Strategy, choices: Choices) -> None:
    """Refuse what cannot be spread, before anything changes."""
    choices.options.check(strategy)
    _check_plain(model)
    check_dtypes(model, strategy, choices.options.group_below)
    check_optimizer(model, choices.optimizer, choices.settings, strategy)


def _said(model: nn.Module, strategy: Strategy, choices: Choices) -> dict[str, Any]:
    """What all ranks have to pass alike."""
    optimizer = choices.optimizer
    is_made = isinstance(optimizer, Optimizer)
    return {
        "strategy": str(strategy),
        **choices.options.said(),
        "example": "none" if choices.options.example is None else "given",
        "optimizer": getattr(type(optimizer) if is_made else optimizer, "__qualname__", ""),
        "optimizer_options": described_options([choices.settings]),
        "model": described(model),
    }


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that something else has spread or wrapped, or that has no values."""
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
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise UsageError(
            "the model is on the meta device: it has no values to begin with",
            where=empty,
            hint="make it on the host; or model.to_empty(device=…), and load a checkpoint",
        )


def device_of(model: nn.Module, given: torch.device | str | None) -> torch.device:
    """Where to compute: on this rank's GPU where ranks communicate from there, else where the
    model is.
    """
    if given is not None:
        return torch.device(given)
    if dist.is_initialized() and "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return next((p.device for p in model.parameters()), torch.device("cpu"))


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
