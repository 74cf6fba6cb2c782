"""The buffers of modules, which keep what they hold although something runs that changes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Buffers = dict[str, torch.Tensor | None]


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards the modules have the buffers that they have now, which hold what they hold now."""
    before = buffers_of({id(inner): inner for each in modules for inner in each.modules()}.values())
    buffers = [buffer for _, held in before for buffer in held.values() if buffer is not None]
    distinct = {id(buffer): buffer for buffer in buffers}.values()
    copies = [(buffer, buffer.detach().clone()) for buffer in distinct]
    try:
        yield
    finally:
        put_buffers(before)
        for buffer, copy in copies:
            # Not counted as a change: autograd may have saved the buffer itself.
            buffer.data.copy_(copy)


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
