"""A model that ranks train together, whatever the strategy: what `as_distributed` returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.live.checkpointer import save
from ckptkit.live.restore import Restored, load
from ckptkit.live.sharded_optimizer import ShardedOptimizerState
from ckptkit.live.shards import DistributedModel, LocalShard
from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.live.state.extra import data_rank
from ckptkit.live.state.ranks import current_world, meeting
from ckptkit.live.state.tensors import local_of
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.data_parallel import (
    Unit,
    check_reduced,
    end_passes,
    let_go,
    zero_grad,
)
from ckptkit.parallel.strategies.options import SHARDED, StrategyOptions, mapped, opened, share
from ckptkit.parallel.strategies.pipeline import LossFunction, StagePipeline

_WIDE = (torch.float64, torch.complex128)
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_RESIDUALS = "compression"
"""The group of a checkpoint in which compression keeps what it has left unsent."""

log = logging.getLogger("ckptkit.parallel")


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of one kind of tensors.

    >>> Bytes(here=10, whole=40).share
    0.25
    """

    here: int
    whole: int

    @property
    def share(self) -> float:
        """What this rank has of the whole."""
        return self.here / self.whole if self.whole else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What is held between two steps.

    >>> dist = as_distributed(torch.nn.Linear(4, 2), "single", optimizer=torch.optim.SGD)
    >>> dist.memory().parameters.here
    40
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class SpreadJob:
    """What is spread how, and over which mesh."""

    strategy: Strategy
    options: StrategyOptions
    device: torch.device
    axis_of: Mapping[str, str]
    """By kind, what the mesh calls its axes."""
    mesh: DeviceMesh | None
    """None for one rank alone."""

    @classmethod
    def of(cls, strategy: Strategy, options: StrategyOptions, device: torch.device) -> SpreadJob:
        """The mesh is made by all ranks together."""
        # The mesh calls zero2 and zero3 `fsdp`, as checkpoints do.
        names = {
            axis.kind: "fsdp" if axis.name == axis.kind and axis.kind in SHARDED else axis.name
            for axis in strategy.mesh.axes
        }
        shape, mesh = strategy.mesh.sizes, None
        if shape:
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(names.values()))
        return cls(strategy, options, device, names, mesh)

    def along(self, *kinds: str) -> DeviceMesh:
        """The part of the mesh along the axes of these kinds that there are."""
        assert self.mesh is not None  # noqa: S101 — there is one where there are axes
        found = tuple(self.axis_of[kind] for kind in kinds if kind in self.axis_of)
        return self.mesh[found[0] if len(found) == 1 else found]


class Distributed:
    """One rank's part of a model that is spread over a job; what `as_distributed` returns.

    Every rank makes the same calls. `step` runs under every strategy; without a pipeline, `model`
    is a module to call, and a loop of one's own is as good.

    - `model`: what to call, and to pass to a Checkpointer: the wrapped module; the schedule of a
      pipeline, which only `step` runs.
    - `modules`: those of this rank: one, or its stages of a pipeline.
    - `strategy`: with all sizes.
    - `mesh`: that of its axes; None for one rank alone.
    - `device`: where this rank computes.
    - `replicas`: how many shares every batch is cut into; ranks of one share compute together.
    - `replica`: which of the shares is this rank's.
    - `compression`: what compresses gradients, if anything does; it counts the bytes sent.
    - `units`: what `fully_shard` or `replicate` gathers together, each by one collective, the
      names of its layers and its bytes; none under other engines.

    >>> model = torch.nn.Linear(4, 2)
    >>> dist = as_distributed(model, "single", optimizer=torch.optim.SGD)  # or "fsdp", "tp:2", …
    >>> batch = torch.ones(6, 4), torch.zeros(6, 2)
    >>> loss = dist.step(torch.nn.functional.mse_loss, dist.share(batch))
    >>> bool(loss > dist.step(torch.nn.functional.mse_loss, dist.share(batch)))
    True
    """

    def __init__(
        self,
        job: SpreadJob,
        modules: Sequence[nn.Module],
        *,
        optimizer: Optimizer | None = None,
        pipeline: StagePipeline | None = None,
        compression: Any = None,
        units: Sequence[Unit] = (),
    ) -> None:
        self.strategy = strategy = job.strategy
        self.options = job.options
        replica, replicas = data_rank(strategy, dist.get_rank() if dist.is_initialized() else 0)
        self.replica, self.replicas = replica, replicas or 1
        self.modules = tuple(modules)
        self.mesh = job.mesh
        self.device = job.device
        self.compression = compression
        self.units = tuple(units)
        self.model: Any = self.modules[0] if pipeline is None else pipeline.schedule
        self._optimizer = optimizer
        self._pipeline = pipeline
        if optimizer is not None and any(
            isinstance(each, FSDPModule) for module in self.modules for each in module.modules()
        ):
            # What is still gathered would keep the old values.
            optimizer.register_step_pre_hook(partial(end_passes, self.modules))
        # Neither engines nor optimizers would train from now on what is frozen now; but for what
        # an optimizer of the caller's, for one rank alone, has nevertheless.
        groups = optimizer.param_groups if optimizer is not None else ()
        stepped = {parameter for group in groups for parameter in group["params"]}
        is_spread, is_stepped = bool(strategy.mesh.axes), optimizer is not None
        self._frozen = [
            (canonical_names(every_module(module))(name), parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
            and (is_spread or (is_stepped and parameter not in stepped))
        ]

    @property
    def optimizer(self) -> Any:
        """The optimizer of what this rank has: an ordinary one of torch, for schedulers too."""
        if self._optimizer is None:
            raise UsageError(
                "there is no optimizer", hint="as_distributed(…, optimizer=torch.optim.AdamW)"
            )
        return self._optimizer

    def share(self, batch: Any) -> Any:
        """The rank's share of a batch of the whole job: of every tensor, along the first dim. Other
        values go to all ranks whole; arrays and lists of as many entries are refused.
        """
        return share(batch, self.replica, self.replicas)

    def step(self, loss_fn: LossFunction, batch: Any) -> torch.Tensor:
        """Forward, backward and a step of the optimizer over this rank's share of a batch, a pair
        of inputs and targets; returns the mean loss of all shares, on every rank.

        `loss_fn(outputs, targets)` is a mean over the batch. Shares weigh alike, so that those of
        different sizes do not give the gradient of all of their entries together.
        """
        optimizer = self.optimizer
        self.zero_grad()
        losses = self.backward(loss_fn, batch)
        optimizer.step()
        total = torch.zeros(2, dtype=torch.float32, device=self.device)
        for loss in losses:
            total += torch.stack([loss.detach().float(), torch.ones_like(total[1])])
        if self.strategy.world_size > 1:
            dist.all_reduce(total)
        return total[0] / total[1]

    def backward(self, loss_fn: LossFunction, batch: Any) -> list[torch.Tensor]:
        """Forward and backward only, for a loop that clips or inspects gradients; the losses of
        this rank's micro-batches (of the last stage, in a pipeline).
        """
        late = [name for name, parameter in self._frozen if parameter.requires_grad]
        if late:
            raise UsageError(
                "parameters are to be trained that were frozen when the model was spread",
                value=late[:10],
                hint="save, make the model anew, unfreeze them, spread it, and load",
            )
        batch = mapped(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
        if self._pipeline is not None:
            inputs, named, targets = opened(batch)
            if named:
                raise UsageError("a pipeline takes positional inputs", value=list(named))
            return self._pipeline.run(loss_fn, inputs, targets)
        model, count, losses = self.modules[0], self.options.microbatches, []
        for number in range(count):
            inputs, named, targets = opened(share(batch, number, count))
            # Gradients are added up without sending them where that costs no memory, as FSDP's do.
            held: AbstractContextManager[Any] = nullcontext()
            if number < count - 1 and isinstance(model, DistributedDataParallel):
                held = model.no_sync()
            with held:
                loss = loss_fn(model(*inputs, **named), targets)
                (loss / count if count > 1 else loss).backward()
            losses.append(loss.detach())
        check_reduced(model)
        return losses

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm of `max_norm`, where it is larger:
        between `backward` and `optimizer.step()`, on every rank. Returns the norm before.
        """
        end_passes(self.modules)
        trained = [p for p in self._parameters() if p.requires_grad]
        for parameter in trained:
            gradient = parameter.grad
            # That of an embedding may be whole on each rank.
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        norm = _norm_of_all(trained, self._groups("pp"), self.device)
        scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
        for parameter in trained:
            if parameter.grad is not None:
                local_of(parameter.grad).mul_(scale.to(parameter.grad.device))
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, trained or not."""
        for module in self.modules:
            zero_grad(module)

    def optimizer_state(self) -> ShardedOptimizerState:
        """What the optimizer keeps on this rank, parameter by parameter: the same interface for
        every strategy, and nothing is gathered.
        """
        return ShardedOptimizerState(self.model, self.optimizer, mesh=self.mesh)

    def memory(self) -> Memory:
        """The bytes of parameters, gradients and optimizer state, of this rank and in all; ranks
        that have different ones are asked, so every rank calls it.
        """
        for module in self.modules:
            let_go(module)
        stages, owners = self._groups("pp"), self._groups("zero1")
        parameters = self._parameters()
        inner = getattr(self._optimizer, "optim", self._optimizer)  # of ZeRO-1, this rank's own
        kept = inner.state.values() if inner is not None else ()

        def counted(tensors: Iterable[object], groups: Sequence[dist.ProcessGroup]) -> Bytes:
            found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            here = sum(local_of(t).numel() * t.element_size() for t in found)
            whole = torch.tensor(
                sum(t.numel() * t.element_size() for t in found), device=self.device
            )
            for group in groups:
                dist.all_reduce(whole, group=group)
            return Bytes(here, int(whole))

        return Memory(
            counted(parameters, stages),
            counted((p.grad for p in parameters), stages),
            counted((value for each in kept for value in each.values()), [*stages, *owners]),
        )

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint has to hold, as a Checkpointer takes it: `save(step, **state)`."""
        found = {"model": self.model, "optimizer": self._optimizer}
        if self.compression is None:
            return found
        return found | {"state": {_RESIDUALS: _Residuals(self.compression)}}

    def save(
        self,
        location: str | os.PathLike[str],
        step: int,
        *,
        extra: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        """Save a step of the run at `location`, with the options of `ckptkit.live.save`."""
        state = _with_own(self.state, options)
        save(location, step=step, extra=extra, mesh=self.mesh, **state, **options)

    def load(self, location: str | os.PathLike[str], **options: Any) -> Restored:
        """Load a step, or the newest of a run, that any strategy saved, with the options of
        `ckptkit.live.load`. What was left unsent is kept by the same compression only; a step that
        was saved without any loads too, and then nothing is left unsent.
        """
        state, stored = self.state, options.get("storage_options")

        def has_residuals() -> bool:
            try:
                with open_checkpoint(location, storage_options=stored) as checkpoint:
                    return any(item.name == _RESIDUALS for item in checkpoint.manifest.objects)
            except CkptkitError:
                return True  # the load itself says what is wrong

        if self.compression is not None:
            with all_ranks("residuals", options.get("timeout", DEFAULT_TIMEOUT)) as ranks:
                found = ranks.share(has_residuals)  # as rank 0 sees it
            if not found:
                del state["state"]
        return load(location, mesh=self.mesh, **_with_own(state, options), **options)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole parameters and buffers, in host memory, on rank 0; None on the others. Every
        rank calls it.
        """
        return DistributedModel(self).full_state_dict()

    def local_shard(self) -> LocalShard:
        """What this rank holds of model and optimizer, in their own memory: no copy, no file."""
        return DistributedModel(self, self._optimizer).local_shard()

    def load_local_shard(self, shard: LocalShard) -> None:
        """Take over what `local_shard` gave on this rank of a job of the same strategy."""
        DistributedModel(self, self._optimizer).load_local_shard(shard)

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def _groups(self, kind: str) -> list[dist.ProcessGroup]:
        """The groups along axes of a kind on which this rank is not alone."""
        axes = [axis for axis in self.strategy.mesh.axes if axis.kind == kind and axis.size > 1]
        return [self.mesh.get_group(axis.name) for axis in axes if self.mesh is not None]


def _with_own(state: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The state, and what the caller has of its own among the options."""
    own = options.pop("state", None)
    return state | {"state": {**state.get("state", {}), **own}} if own else state


def _norm_of_all(
    trained: Sequence[nn.Parameter], stages: Sequence[dist.ProcessGroup], device: torch.device
) -> torch.Tensor:
    """The norm of the gradients of a whole model, of which ranks have parts; `stages` join ranks
    that have different parameters.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    # By the groups whose ranks have different parts of a tensor. Over others all have the same, and
    # a sum would count it as often as there are ranks; and all ranks meet in the same order, so an
    # entry is made where there is no gradient too.
    by_groups: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    for parameter in trained:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
            groups = tuple(mesh.get_group(dim) for dim in cut)
        square = by_groups.setdefault(groups, torch.zeros_like(total))
        if parameter.grad is None:
            continue
        gradient = local_of(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        # In 32 bits at least: in 16, squares overflow, or lose most of their digits.
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(gradient, dtype=wide)
        square += norm.double().square().to(device)
    for groups, square in by_groups.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    for group in stages:
        dist.all_reduce(total, group=group)
    is_wide = any(parameter.dtype in _WIDE for parameter in trained)
    return total.sqrt().to(torch.float64 if is_wide else torch.float32)


class _Residuals:
    """The state of a compression, which that of another one leaves as it is."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self.state_dict: Callable[[], dict[str, Any]] = compression.state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over, if it is of the same compression."""
        if state.get("spec") != self._compression.spec:
            log.info(
                "residuals of %s are of no use to %s", state.get("spec"), self._compression.spec
            )
            return
        self._compression.load_state_dict(state)


def all_ranks(what: str, timeout: float = DEFAULT_TIMEOUT) -> AbstractContextManager[Ranks]:
    """The ranks of the job, to meet without a collective; a failure of one is raised on all."""
    return meeting(current_world(), what, timeout, "the ranks do not go on")
