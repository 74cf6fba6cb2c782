"""What all ways of compressing gradients have in common: a hook of a DDP model, counts, a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.live.models import Model
from ckptkit.live.snapshot import parameter_names
from ckptkit.parallel.optimizers.compression.wire import Wire

Sent = torch.futures.Future[torch.Tensor]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Compression(ABC):
    """Sends the gradients of a `DistributedDataParallel` model in fewer bytes.

    Every rank makes one and attaches it before the first step. What it remembers from step to step
    belongs into the checkpoint: `Checkpointer.save(..., state={"compression": compression})`. It
    does not depend on how DDP puts the gradients into buckets.
    """

    remembers: ClassVar[bool] = False
    """Whether something is left unsent from step to step."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._wire: Wire | None = None
        self._names: dict[torch.nn.Parameter, str] = {}

    def attach(self, model: DistributedDataParallel) -> None:
        """Let the gradients of a model go through here; once, before its first step."""
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                "gradients are compressed where DistributedDataParallel sends them",
                where=f"compression {self.spec}",
                value=type(model).__name__,
                hint="ddp and zero1 are DistributedDataParallel models, the other strategies not",
            )
        if self._wire is not None:
            raise UsageError(
                "attached already", where=f"compression {self.spec}", hint="make one for each model"
            )
        self._names = parameter_names(Model(model).entries())
        self._check_dtypes()
        self._wire = Wire(model.process_group)
        # DDP checks annotations, and cannot read those that are text.
        model.register_comm_hook(self, lambda self, bucket: self._hook(bucket))

    @property
    def wire(self) -> Wire:
        """The process group of the model."""
        if self._wire is None:
            raise UsageError("not attached to a model yet", where=f"compression {self.spec}")
        return self._wire

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far."""
        return 0 if self._wire is None else self._wire.sent

    @property
    def bytes_uncompressed(self) -> int:
        """What it would have sent without compression."""
        return 0 if self._wire is None else self._wire.uncompressed

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""
        return {"spec": self.spec}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of a job of any number of ranks."""
        if state.get("spec") != self.spec:
            raise UsageError(
                "the state is of another compression",
                where=f"compression {self.spec}",
                value=state.get("spec"),
            )

    def allocate(self) -> None:  # noqa: B027 — most remember nothing
        """Make what would be made in the first step, so that a load fills it in place: for a step
        of a job of as many ranks, and otherwise not.
        """

    def _check_dtypes(self) -> None:
        for parameter, name in self._names.items():
            if parameter.requires_grad and parameter.dtype not in _DTYPES:
                raise UsageError(
                    "gradients of this dtype cannot be compressed",
                    where=f"compression {self.spec}, {name}",
                    value=str(parameter.dtype),
                    hint="leave the compression out, or make the parameter of real numbers, such "
                    "as by torch.view_as_real",
                )

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names[cast("torch.nn.Parameter", parameter)]

    def _hook(self, bucket: GradBucket) -> Sent:
        self.wire.would_reduce(bucket.buffer())
        return self._send(bucket)

    @abstractmethod
    def _send(self, bucket: GradBucket) -> Sent:
        """Put the mean of a bucket's gradients over all ranks into its buffer."""
