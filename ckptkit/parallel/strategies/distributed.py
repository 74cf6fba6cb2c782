"""A model that ranks train together, whatever the strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptkit.errors import UsageError
from ckptkit.live import Restored, ShardedOptimizerState, distributed_model, load, save
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.batches import mapped, microbatches, opened, share
from ckptkit.parallel.strategies.clipping import clip
from ckptkit.parallel.strategies.frozen import Frozen
from ckptkit.parallel.strategies.grouping import Unit
from ckptkit.parallel.strategies.local_state import load_local_state, local_state
from ckptkit.parallel.strategies.memory import Memory, measured
from ckptkit.parallel.strategies.pipeline import Pipeline
from ckptkit.parallel.strategies.replicated import check_reduced
from ckptkit.parallel.strategies.residuals import RESIDUALS, Residuals, has_residuals
from ckptkit.parallel.strategies.sharded import end_passes, is_cut, let_go, zero_grad
from ckptkit.parallel.strategies.spec import SHARDED

LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]

_REPLICAS = ("ddp", "zero1", *SHARDED)


class Distributed:
    """One rank's part of a model that is spread over a job; what `as_distributed` returns.

    Every rank makes the same calls. `step` runs under every strategy; without a pipeline, `model`
    is a module to call, and a loop of one's own is as good.

    >>> model = torch.nn.Linear(4, 2)
    >>> dist = as_distributed(model, "single", optimizer=torch.optim.SGD)  # or "fsdp", "tp:2", …
    >>> batch = torch.ones(6, 4), torch.zeros(6, 2)
    >>> loss = dist.step(torch.nn.functional.mse_loss, dist.share(batch))
    >>> bool(loss > dist.step(torch.nn.functional.mse_loss, dist.share(batch)))
    True
    """

    def __init__(  # noqa: PLR0913 — all that spreading has found out
        self,
        strategy: Strategy,
        modules: Sequence[nn.Module],
        *,
        mesh: DeviceMesh | None,
        device: torch.device,
        optimizer: Optimizer | None = None,
        pipeline: Pipeline | None = None,
        accumulate: int = 1,
        compression: Any = None,
        units: Sequence[Unit] = (),
    ) -> None:
        self._strategy = strategy
        self._modules = tuple(modules)
        self._mesh = mesh
        self._device = device
        self._optimizer = optimizer
        self._pipeline = pipeline
        self._accumulate = accumulate
        self._compression = compression
        self._units = tuple(units)
        if optimizer is not None and any(map(is_cut, modules)):
            # What is still gathered would keep the old values.
            optimizer.register_step_pre_hook(partial(_end_passes, self._modules))
        self._frozen = Frozen(modules, optimizer, is_spread=bool(strategy.mesh.axes))

    @property
    def model(self) -> Any:
        """What to call, and to pass to a Checkpointer: the wrapped module; the schedule of a
        pipeline, which only `step` runs.
        """
        return self._modules[0] if self._pipeline is None else self._pipeline.schedule

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of this rank: one, or its stages of a pipeline."""
        return self._modules

    @property
    def optimizer(self) -> Any:
        """The optimizer of what this rank has: an ordinary one of torch, for schedulers too."""
        if self._optimizer is None:
            raise UsageError(
                "there is no optimizer", hint="as_distributed(…, optimizer=torch.optim.AdamW)"
            )
        return self._optimizer

    @property
    def strategy(self) -> Strategy:
        """The strategy, with all sizes."""
        return self._strategy

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of its axes; None for one rank alone."""
        return self._mesh

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def compression(self) -> Any:
        """What compresses gradients, if anything does; it counts the bytes sent."""
        return self._compression

    @property
    def units(self) -> tuple[Unit, ...]:
        """What `fully_shard` or `replicate` gathers together, each by one collective, the names of
        its layers and its bytes; none under other engines.
        """
        return self._units

    @property
    def replicas(self) -> int:
        """How many shares every batch is cut into; ranks of one share compute together."""
        sizes = [axis.size for axis in self._strategy.mesh.axes if axis.kind in _REPLICAS]
        found = 1
        for size in sizes:
            found *= size
        return found

    @property
    def replica(self) -> int:
        """Which of the shares is this rank's."""
        mesh = self._strategy.mesh
        number = 0
        for axis, at in zip(mesh.axes, mesh.coords(self._rank), strict=True):
            if axis.kind in _REPLICAS:
                number = number * axis.size + at
        return number

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
        return self._mean(losses)

    def backward(self, loss_fn: LossFunction, batch: Any) -> list[torch.Tensor]:
        """Forward and backward only, for a loop that clips or inspects gradients; the losses of
        this rank's micro-batches (of the last stage, in a pipeline).
        """
        self._frozen.check()
        batch = self._placed(batch)
        if self._pipeline is not None:
            inputs, named, targets = opened(batch)
            if named:
                raise UsageError("a pipeline takes positional inputs", value=list(named))
            return self._pipeline.run(loss_fn, inputs, targets)
        losses = [
            self._one(loss_fn, piece, is_last=number == self._accumulate - 1)
            for number, piece in enumerate(microbatches(batch, self._accumulate))
        ]
        check_reduced(self._modules[0])
        return losses

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm of `max_norm`, where it is larger:
        between `backward` and `optimizer.step()`, on every rank. Returns the norm before.
        """
        _end_passes(self._modules)
        parameters = dict.fromkeys(p for module in self._modules for p in module.parameters())
        return clip(parameters, max_norm, self._groups("pp"), self._device)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, trained or not."""
        for module in self._modules:
            zero_grad(module)

    def optimizer_state(self) -> ShardedOptimizerState:
        """What the optimizer keeps on this rank, parameter by parameter: the same interface for
        every strategy, and nothing is gathered.
        """
        return ShardedOptimizerState(self.model, self.optimizer, mesh=self._mesh)

    def memory(self) -> Memory:
        """The bytes of parameters, gradients and optimizer state, of this rank and in all; ranks
        that have different ones are asked, so every rank calls it.
        """
        for module in self._modules:
            let_go(module)
        return measured(
            self._modules,
            self._optimizer,
            parts=self._groups("pp"),
            owners=self._groups("zero1"),
            device=self._device,
        )

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint has to hold, as a Checkpointer takes it: `save(step, **state)`."""
        found = {"model": self.model, "optimizer": self._optimizer}
        return found if self._compression is None else found | {"state": self._unsent()}

    def save(
        self,
        location: str | os.PathLike[str],
        step: int,
        *,
        extra: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        """Save a step of the run at `location`, with the options of `ckptkit.live.save`."""
        state = self._with_own(self.state, options)
        save(location, step=step, extra=extra, mesh=self._mesh, **state, **options)

    def load(self, location: str | os.PathLike[str], **options: Any) -> Restored:
        """Load a step, or the newest of a run, that any strategy saved, with the options of
        `ckptkit.live.load`. What was left unsent is kept by the same compression only; a step that
        was saved without any loads too, and then nothing is left unsent.
        """
        state = self.state
        if self._compression is not None and not has_residuals(location, options):
            del state["state"]
        state = self._with_own(state, options)
        return load(location, mesh=self._mesh, **state, **options)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole parameters and buffers, in host memory, on rank 0; None on the others. Every
        rank calls it.
        """
        return distributed_model(self).full_state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds of model and optimizer, in their own memory; nothing is gathered."""
        return local_state(self.model, self._optimizer, self._mesh)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank of a job of the same strategy."""
        load_local_state(state, self.model, self._optimizer, self._mesh)

    def _unsent(self) -> dict[str, Any]:
        return {RESIDUALS: Residuals(self._compression)}

    def _with_own(self, state: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """The state, and what the caller has of its own among the options."""
        own = options.pop("state", None)
        return state | {"state": {**state.get("state", {}), **own}} if own else state

    def _groups(self, kind: str) -> list[dist.ProcessGroup]:
        """Those of the axes of a kind on which this rank is not alone."""
        axes = [axis for axis in self._strategy.mesh.axes if axis.kind == kind and axis.size > 1]
        return [self._mesh.get_group(axis.name) for axis in axes if self._mesh is not None]

    def _one(self, loss_fn: LossFunction, batch: Any, *, is_last: bool) -> torch.Tensor:
        inputs, named, targets = opened(batch)
        with nullcontext() if is_last else self._unsynchronised():
            loss = loss_fn(self._modules[0](*inputs, **named), targets)
            (loss / self._accumulate if self._accumulate > 1 else loss).backward()
        return loss.detach()

    def _unsynchronised(self) -> AbstractContextManager[Any]:
        """Add gradients up without sending them, where that costs no memory."""
        module = self._modules[0]
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(2, dtype=torch.float32, device=self._device)
        for loss in losses:
            total += torch.stack([loss.detach().float(), torch.ones_like(total[1])])
        if self._strategy.world_size > 1:
            dist.all_reduce(total)
        return total[0] / total[1]

    def _placed(self, batch: Any) -> Any:
        """The tensors of a batch on this rank's device."""
        return mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0


def _end_passes(modules: Sequence[nn.Module], *_: Any) -> None:
    for module in modules:
        end_passes(module)
