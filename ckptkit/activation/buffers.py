"""The buffers of modules, which keep what they hold although something runs that changes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

Buffers = dict[str, torch.Tensor | None]


def buffers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Buffers]]:
    """The buffers that each of the modules itself has."""
    return [(module, dict(module._buffers)) for module in modules if module._buffers]


def put_buffers(held: Sequence[tuple[nn.Module, Buffers]]) -> None:
    """Let modules have these buffers, and no others."""
    for module, buffers in held:
        own = module._buffers
        for name in own.keys() - buffers.keys():
            del own[name]
        for name, buffer in buffers.items():
            if own.get(name) is not buffer:
                own[name] = buffer
