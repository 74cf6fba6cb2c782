"""Stages of a pipeline and the schedule that runs them: torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.parallel.strategies.batches import tensors_of
from ckptkit.parallel.strategies.options import Options

Schedule: TypeAlias = Any
LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]


class Pipeline:
    """The stages of this rank, and the schedule that all ranks of the pipeline run together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        numbers: Sequence[int],
        count: int,
        options: Options,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.stages = [
            PipelineStage(module, number, count, device, group=group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        self.microbatches = options.microbatches
        self._loss_function: LossFunction | None = None
        self.schedule = self._schedule(options)

    def run(
        self, loss_function: LossFunction, inputs: tuple[Any, ...], targets: Any
    ) -> list[torch.Tensor]:
        """Forward and backward of a batch; the losses of its micro-batches on the last stage."""
        self._check_even(inputs, targets)
        self._loss_function = loss_function
        losses: list[torch.Tensor] = []
        given = inputs if any(stage.is_first for stage in self.stages) else ()
        is_last = any(stage.is_last for stage in self.stages)
        with self._unsynchronised():
            self.schedule.step(
                *given, target=targets if is_last else None, losses=losses, return_outputs=False
            )
        return losses

    def _unsynchronised(self) -> ExitStack:
        """Only the last backward pass of a step sends gradients, as torch sees to, but for the
        first step, in which a stage runs once more to see its shapes.
        """
        stack = ExitStack()
        for stage in self.stages:
            if isinstance(stage.submod, DistributedDataParallel):
                stack.enter_context(stage.submod.no_sync())
        return stack

    def _schedule(self, options: Options) -> Schedule:
        count = self.microbatches
        if options.schedule == "interleaved":
            return ScheduleInterleaved1F1B([*self.stages], count, self._loss)
        make = ScheduleGPipe if options.schedule == "gpipe" else Schedule1F1B
        return make(self.stages[0], count, self._loss)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        # A schedule is made before anybody has a loss.
        assert self._loss_function is not None  # noqa: S101 — set by `run`
        return self._loss_function(outputs, targets)

    def _check_even(self, inputs: tuple[Any, ...], targets: Any) -> None:
        """Refuse what torch would cut into micro-batches of different sizes, and then hang."""
        if not torch.is_tensor(targets):
            raise UsageError(
                "the targets of a pipeline are one tensor",
                value=type(targets).__name__,
                hint="put them together, and let loss_fn take them apart",
            )
        for tensor in tensors_of((inputs, targets)):
            if not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % self.microbatches:
                raise UsageError(
                    f"a batch that {self.microbatches} micro-batches cannot share evenly",
                    value=tuple(tensor.shape),
                    hint="choose microbatches= that divides the first dim",
                )
