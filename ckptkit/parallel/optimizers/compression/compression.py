"""What all ways of compressing gradients have in common: a hook of a DDP model, or what reduces and
scatters for `fully_shard`; counts; a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.live.wrappers.entries import parameter_names
from ckptkit.live.wrappers.modules import own_param_groups
from ckptkit.live.wrappers.training import Model
from ckptkit.parallel.optimizers.compression.wire import Wire

Sent = torch.futures.Future[torch.Tensor]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Compression(ABC):
    """Sends the gradients of a `DistributedDataParallel` model in fewer bytes; those of a
    `fully_shard` model where nothing is left unsent.

    Every rank makes one and attaches it before the first step. What it remembers from step to step
    belongs into the checkpoint: `Checkpointer.save(..., state={"compression": compression})`. It
    does not depend on how DDP puts the gradients into buckets.

    >>> compression = compression_of("int8")  # then compression.attach(model)
    >>> compression.bytes_sent, compression.remembers
    (0, False)
    """

    remembers: ClassVar[bool] = False
    """Whether something is left unsent from step to step."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._wire: Wire | None = None
        self._names: dict[torch.nn.Parameter, str] = {}

    def attach(self, model: nn.Module) -> None:
        """Let the gradients of a model go through here; once, before its first step."""
        if not isinstance(model, (DistributedDataParallel, FSDPModule)):
            raise UsageError(
                "gradients are compressed where DistributedDataParallel or fully_shard sends them",
                where=f"compression {self.spec}",
                value=type(model).__name__,
                hint="pass the wrapped model",
            )
        if self._wire is not None:
            raise UsageError(
                "attached already", where=f"compression {self.spec}", hint="make one for each model"
            )
        self._names = parameter_names(Model(model).entries())
        self._check_dtypes()
        if isinstance(model, FSDPModule):
            self._wire = Wire(self._scattering(model))
            comm = _ReduceScatter(self)
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_custom_reduce_scatter(comm)
            return
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

    def _scattering(self, model: nn.Module) -> dist.ProcessGroup:
        """The ranks over which `fully_shard` cuts a model."""
        if self.remembers:
            raise UsageError(
                "what is left unsent is as large as all gradients, on every rank, and fully_shard "
                "keeps a part of them only",
                where=f"compression {self.spec}",
                hint="fp16, bf16 and int8 leave nothing unsent; or use ddp or zero1",
            )
        units = (module for module in model.modules() if isinstance(module, FSDPModule))
        meshes = {group.mesh_info.mesh for unit in units for group in own_param_groups(unit)}
        if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise UsageError(
                "replicas of what is cut take their mean by an all-reduce that torch lets nobody "
                "replace",
                where=f"compression {self.spec}",
                hint="use fsdp or zero2 over all ranks",
            )
        group: dist.ProcessGroup = meshes.pop().get_group()
        return group

    def scatter_reduce(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks of the piece that is this rank's, of one for each rank."""
        data = [self._packed(piece) for piece in pieces]
        total = torch.zeros_like(pieces[0], dtype=torch.float32)
        for received in self.wire.exchange(data, data[0].numel()):
            total += self._unpacked(received, total.numel())
        return total

    def _packed(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes that are sent for some elements."""
        raise NotImplementedError

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """The elements that they stand for."""
        raise NotImplementedError

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


class _ReduceScatter(ReduceScatter):
    """What `fully_shard` calls with the gradients of a unit, in equal pieces for all ranks."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        """Fill the output with this rank's piece of the sum, or of the mean."""
        wire = self._compression.wire
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UsageError("no sum and no mean", where="compression", value=str(op))
        wire.would_scatter(input_tensor)
        total = self._compression.scatter_reduce(input_tensor.chunk(group.size()))
        output_tensor.copy_(total / wire.size if op == dist.ReduceOp.AVG else total)
