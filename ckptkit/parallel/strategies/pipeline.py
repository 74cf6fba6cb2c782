"""The schedule that runs the stages of a pipeline: torch's own."""

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
from ckptkit.live.wrappers.modules import keeping_buffers
from ckptkit.parallel.strategies.batches import tensors_of
from ckptkit.parallel.strategies.options import StrategyOptions

LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]


class _KeepingStage(PipelineStage):
    """A stage whose buffers stay as they are when torch runs it once more to see its shapes."""

    _keeping = ExitStack()

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(keeping_buffers(self.submod.modules()))
            found = super()._forward_metadata_inference(*args, **kwargs)
            self._keeping = stack.pop_all()
        return found

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        self._keeping.close()


class _OnlySteps:
    """What a schedule of torch lacks: an answer to those who take it for a module."""

    def __call__(self, *_: object, **__: object) -> Any:
        raise UsageError(
            "the model of a pipeline cannot be called: no rank has all of it",
            hint="dist.step and dist.backward run it; to evaluate it, load its checkpoint into "
            "another strategy",
        )


class _GPipe(_OnlySteps, ScheduleGPipe):
    pass


class _OneForwardOneBackward(_OnlySteps, Schedule1F1B):
    pass


class _Interleaved(_OnlySteps, ScheduleInterleaved1F1B):
    pass


class StagePipeline:
    """The stages of this rank, and the schedule that all ranks of the pipeline run together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        options: StrategyOptions,
        *,
        numbers: Sequence[int],
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.stages = [
            _KeepingStage(module, number, count, device, group=group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        self._count = options.microbatches
        self._loss_function: LossFunction | None = None
        self._losses: list[torch.Tensor] = []
        self._shapes: list[tuple[int, ...]] = []
        # `_loss` divides each loss. Torch would divide the gradients at the end, those of earlier
        # passes too, where these add up.
        settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if options.schedule == "interleaved":
            self.schedule: Any = _Interleaved([*self.stages], self._count, **settings)
        else:
            make = _GPipe if options.schedule == "gpipe" else _OneForwardOneBackward
            self.schedule = make(self.stages[0], self._count, **settings)

    def run(
        self, loss_function: LossFunction, inputs: tuple[Any, ...], targets: Any
    ) -> list[torch.Tensor]:
        """Forward and backward of a batch; the losses of its micro-batches on the last stage."""
        self._check(inputs, targets)
        self._loss_function = loss_function
        self._losses.clear()
        given = inputs if any(stage.is_first for stage in self.stages) else ()
        is_last = any(stage.is_last for stage in self.stages)
        with ExitStack() as stack:
            # Only the last backward pass of a step sends gradients, as torch sees to, but for the
            # first step, in which a stage runs once more to see its shapes.
            for stage in self.stages:
                if isinstance(stage.submod, DistributedDataParallel):
                    stack.enter_context(stage.submod.no_sync())
            self.schedule.step(*given, target=targets if is_last else None, return_outputs=False)
        # The first step has one more, of the run in which a stage sees its shapes.
        return self._losses[-self._count :]

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        # A schedule is made before anybody has a loss.
        assert self._loss_function is not None  # noqa: S101 — set by `run`
        loss = self._loss_function(outputs, targets)
        self._losses.append(loss.detach())
        return loss / self._count

    def _check(self, inputs: tuple[Any, ...], targets: Any) -> None:
        """Refuse what torch would cut into micro-batches of different sizes, and then hang; and
        what neighbours do not expect, for which it would end the process.
        """
        if not torch.is_tensor(targets):
            raise UsageError(
                "the targets of a pipeline are one tensor",
                value=type(targets).__name__,
                hint="put them together, and let loss_fn take them apart",
            )
        shapes = [tuple(tensor.shape) for tensor in tensors_of((inputs, targets))]
        for shape in shapes:
            if not shape or not shape[0] or shape[0] % self._count:
                raise UsageError(
                    f"a batch that {self._count} micro-batches cannot share evenly",
                    value=shape,
                    hint="choose microbatches= that divides the first dim",
                )
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UsageError(
                "batches of a pipeline have the same shape in every step",
                value=f"{shapes}, before {self._shapes}",
                hint="leave out the last batch of a pass over the data, or fill it up",
            )
