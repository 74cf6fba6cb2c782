"""`DistributedDataParallel`, with buckets that suit the size of the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.parallel.strategies.grouping import nbytes_of

_MIB = 2**20
_LEAST, _MOST = 1.0, 64.0
_BUCKETS = 8


def wrap(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, *, is_stage: bool = False
) -> nn.Module:
    """The model in `DistributedDataParallel`; as it is where nothing is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=group,
        bucket_cap_mb=bucket_mib(nbytes_of(trained)),
        # Otherwise gradients would lie in memory twice.
        gradient_as_bucket_view=True,
        # A pipeline's first step runs a stage once more to see its shapes, which buckets that are
        # made anew after the first backward pass do not survive; with this they stay as they are.
        find_unused_parameters=is_stage,
    )
    if not is_stage:
        _settle_buckets(wrapped)
    return wrapped


def check_reduced(model: nn.Module) -> None:
    """Refuse to go on after a backward pass in which DDP has not got all gradients, and has not
    sent the others: it would say so in the next step only, after this one was made of what each
    rank has by itself.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        # What DDP begins its next step with, and which does nothing but look after the first.
        model.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        trained = ((n, p) for n, p in model.module.named_parameters() if p.requires_grad)
        missing = [name for name, parameter in trained if parameter.grad is None]
        raise UsageError(
            "some parameters got no gradient, so that replicas could not take the mean of any",
            value=missing[:10] or "frozen since the model was spread",
            hint="freeze what never runs before as_distributed; or use fsdp, where parameters may "
            "be left out of a step",
        ) from error


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP make its buckets anew now rather than after the first step: sums over several ranks
    round otherwise in other buckets, and a resumed job would not go on to the bit as it was.
    """
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return  # those gradients come in another form
    module = model.module
    model.module = _Sum(module)
    try:
        model(None).backward()
    finally:
        model.module = module
    model.zero_grad()


class _Sum(nn.Module):
    """Stands for a model, and uses each of its parameters without running it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, _: None) -> torch.Tensor:
        """One number, whose gradients all parameters get."""
        trained = (p for p in self.parameters() if p.requires_grad)
        return torch.stack([p.sum().real.float() for p in trained]).sum()


def bucket_mib(nbytes: int) -> float:
    """The size of a bucket in MiB: about eight of them, so that sending overlaps with computing,
    each large enough to be worth a collective.
    """
    return min(_MOST, max(_LEAST, nbytes / _MIB / _BUCKETS))
