"""What all ways of compressing gradients have in common.

They come between a model and its gradients: as a hook of DDP, or as what reduces and scatters for
`fully_shard`. They send over a `Wire`, which counts the bytes. What they leave unsent is a state.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.live.state.entries import parameter_names
from ckptkit.live.state.ranks import all_gather_single
from ckptkit.live.wrappers import Model
from ckptkit.live.wrappers.modules import own_param_groups

Sent: TypeAlias = torch.futures.Future[torch.Tensor]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

log = logging.getLogger("ckptkit.parallel")


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
        self._names: dict[Any, str] = {}
        """The names of the parameters in the checkpoint: unlike buckets, names outlive a job."""

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
        for parameter, name in self._names.items():
            if parameter.requires_grad and parameter.dtype not in _DTYPES:
                raise UsageError(
                    "gradients of this dtype cannot be compressed",
                    where=f"compression {self.spec}, {name}",
                    value=str(parameter.dtype),
                    hint="leave the compression out, or make the parameter of real numbers, such "
                    "as by torch.view_as_real",
                )
        for path, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise UsageError(
                    "sparse gradients cannot be compressed",
                    where=f"compression {self.spec}, {path.removeprefix('module.')}",
                    hint="make the embedding with sparse=False, or leave the compression out",
                )
        if not isinstance(model, FSDPModule):
            self._wire = Wire(model.process_group)
            # DDP checks annotations, and cannot read those that are text.
            model.register_comm_hook(self, lambda self, bucket: self._hook(bucket))
            return
        if self.remembers:
            raise UsageError(
                "what is left unsent is as large as all gradients, on every rank, and fully_shard "
                "keeps a part of them only",
                where=f"compression {self.spec}",
                hint="fp16, bf16 and int8 leave nothing unsent; or use ddp or zero1",
            )
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        meshes = {group.mesh_info.mesh for unit in units for group in own_param_groups(unit)}
        if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise UsageError(
                "replicas of what is cut take their mean by an all-reduce that torch lets nobody "
                "replace",
                where=f"compression {self.spec}",
                hint="use fsdp or zero2 over all ranks",
            )
        self._wire = Wire(meshes.pop().get_group())
        comm = _CompressedReduceScatter(self)
        for unit in units:
            unit.set_custom_reduce_scatter(comm)

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
        """What a job that goes on has to know: the compression, and what it has left unsent."""
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
        """Make now what the first step would make, so that a load fills it in place, and each rank
        reads its own row only: before a step of a job of as many ranks is loaded, and no other.
        """

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes that are sent for some elements, where nothing is left unsent."""
        raise NotImplementedError  # `attach` refuses the others where these are asked for

    def unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """The elements, about, that `packed` made bytes of."""
        raise NotImplementedError

    def _hook(self, bucket: GradBucket) -> Sent:
        self.wire.uncompressed += self.wire.ring(bucket.buffer().nbytes)
        return self._send(bucket)

    @abstractmethod
    def _send(self, bucket: GradBucket) -> Sent:
        """Put the mean of a bucket's gradients over all ranks into its buffer."""


class RememberingCompression(Compression):
    """One that adds what it has left unsent to the next gradients; each rank has its own."""

    remembers = True

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self.residuals: dict[str, torch.Tensor] = {}

    def allocate(self) -> None:
        """Make what is remembered of all parameters."""
        for parameter, name in self._names.items():
            if parameter.requires_grad:
                self.remember(name, parameter)

    def remember(self, name: str, like: torch.Tensor) -> None:
        """Make the residual of a parameter, all zero, unless it is there."""
        if name not in self.residuals:
            self.residuals[name] = torch.zeros(like.shape, dtype=torch.float32, device=like.device)

    def state_dict(self) -> dict[str, Any]:
        """The residuals too: an array for each parameter, with a row for each rank, of which this
        one's is in memory only.
        """
        state = super().state_dict()
        if not self.residuals:
            return state
        device = next(iter(self.residuals.values())).device.type
        mesh = DeviceMesh.from_group(self.wire.group, device, mesh_dim_names=("ddp",))
        rows = {
            name: DTensor.from_local(residual[None], mesh, [Shard(0)], run_check=False)
            for name, residual in self.residuals.items()
        }
        return state | {"ranks": self.wire.size, "residuals": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; residuals of another number of ranks are shared out."""
        super().load_state_dict(state)
        parameters = {name: parameter for parameter, name in self._names.items()}
        rows: Mapping[str, Any] = state.get("residuals", {})
        ranks, size, rank = state.get("ranks", 0), self.wire.size, self.wire.rank
        if rows and ranks != size and rank == 0:
            log.info("residuals of %d ranks are shared out among %d", ranks, size)
        self.residuals = {}
        for name, tensor in rows.items():
            parameter = parameters.get(name)
            whole: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if parameter is None or whole.shape[1:] != parameter.shape:
                raise UsageError(
                    "a residual of no parameter of the model",
                    where=f"compression, {name}",
                    value=tuple(whole.shape[1:]),
                )
            if len(whole) == ranks == size:
                row = whole[rank].clone()
            elif len(whole) == 1 and ranks == size:
                row = whole[0]  # of this rank only
            else:
                # Gradients are averaged over ranks: what was left unsent in all of them stays the
                # same.
                row = whole.mean(0)
            self.residuals[name] = row.to(parameter.device, torch.float32)


@dataclass(eq=False)
class _CompressedReduceScatter(ReduceScatter):
    """What `fully_shard` calls with the gradients of a unit, in equal pieces for all ranks."""

    compression: Compression

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
        compression, wire = self.compression, self.compression.wire
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UsageError("no sum and no mean", where="compression", value=str(op))
        wire.uncompressed += input_tensor.nbytes * (wire.size - 1) // wire.size
        pieces = input_tensor.chunk(group.size())
        data = [compression.packed(piece) for piece in pieces]
        total = torch.zeros_like(pieces[0], dtype=torch.float32)
        for received in wire.exchange(data, data[0].numel()):
            total += compression.unpacked(received, total.numel())
        output_tensor.copy_(total / wire.size if op == dist.ReduceOp.AVG else total)


class Wire:
    """One process group, and how many bytes this rank has sent over it.

    An all-reduce counts as the ring that gloo and NCCL make of it: each rank sends all but its own
    part twice.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.is_nccl = dist.get_backend(group) == "nccl"
        self.sent = 0
        self.uncompressed = 0

    def ring(self, nbytes: int) -> int:
        """What this rank sends in an all-reduce of so many bytes."""
        return 2 * nbytes * (self.size - 1) // self.size

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a flat tensor, in its dtype.

        Gloo's all-reduce adds up in an order that depends on where an element stands, so that a
        job which is resumed, and whose first step has other buckets, would differ in the last
        bit. Here it is the order of the ranks; as many bytes are sent.
        """
        if self.is_nccl:
            self.sent += self.ring(tensor.nbytes)
            dist.all_reduce(tensor.div_(self.size), group=self.group)
            return tensor
        dtype, width = tensor.dtype, tensor.element_size()
        exact = dtype if dtype == torch.float64 else torch.float32
        parts = tensor.tensor_split(self.size)
        pieces = [part.contiguous().view(torch.uint8) for part in parts]
        total = torch.zeros_like(parts[self.rank], dtype=exact)
        for piece in self.exchange(pieces, pieces[self.rank].numel()):
            total += piece.clone().view(dtype)
        mine = total.div_(self.size).to(dtype).view(torch.uint8)
        found = self.gather(mine, [width * part.numel() for part in parts])
        return torch.cat(found).view(dtype)

    def exchange(self, pieces: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Send each rank its piece; what all ranks have for this one, of `size` bytes each."""
        received = pieces[0].new_empty(size * self.size)
        dist.all_to_all_single(
            received,
            torch.cat(list(pieces)),
            output_split_sizes=[size] * self.size,
            input_split_sizes=[piece.numel() for piece in pieces],
            group=self.group,
        )
        self.sent += sum(p.nbytes for rank, p in enumerate(pieces) if rank != self.rank)
        # Nothing splits into one part only, however many ranks there are.
        return list(received.split(size)) if size else [received] * self.size

    def gather(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """What each rank has, whose sizes are known everywhere."""
        largest = max(sizes)  # a collective takes as much of every rank
        padded = pad(mine, (0, largest - mine.numel()))
        received = mine.new_empty(largest * self.size)
        all_gather_single(received, padded, group=self.group)
        self.sent += padded.nbytes * (self.size - 1)
        rows = received.view(self.size, largest)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value."""
    devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future
