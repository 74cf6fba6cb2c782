"""Gradients of 16 bits."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)

from ckptkit.parallel.optimizers.compression.compression import Compression, Sent
from ckptkit.parallel.optimizers.compression.wire import done

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class Cast(Compression):
    """Sends 16 bits for each element: "fp16" or "bf16"; by torch's own hooks on NCCL."""

    def _send(self, bucket: GradBucket) -> Sent:
        buffer = bucket.buffer()
        if self.wire.is_nccl:
            self.wire.reduces(2 * buffer.numel())
            return _HOOKS[self.spec](self.wire.group, bucket)
        return done(buffer.copy_(self.wire.mean(buffer.to(_DTYPES[self.spec]))))

    def _packed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(_DTYPES[self.spec]).contiguous().view(torch.uint8)

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return data.clone().view(_DTYPES[self.spec])[:numel].float()
