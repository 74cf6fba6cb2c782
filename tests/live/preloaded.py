"""What the workers of a pool are forked with: imported once, and nothing that they look through."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import ckptkit.activation
import ckptkit.live
import ckptkit.parallel  # noqa: F401
import tests.live.gathering
import tests.live.strategies  # noqa: F401

# A worker that looks for garbage among these would take 0.2 s, and a copy of every page.
gc.collect()
gc.freeze()
