"""Copies of buffers from before a forward, made as rarely as can be: most buffers never change."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ckptkit.activation.memory import unmetered

_SMALL = 4096  # bytes: counters and the like, which may change seldom
_TRIES = 3  # how often a copy is made for all forwards, before the buffer counts as changing


@dataclass(slots=True)
class Copy:
    """What a buffer held."""

    tensor: torch.Tensor
    version: int
    is_shared: bool
    """Whether it is for all forwards until the buffer changes; so it is in host memory."""
    is_stale: bool = False
    """Whether the buffer has changed without saying so in its version."""

    def is_needed(self, buffer: torch.Tensor) -> bool:
        """Whether the buffer may hold something else now."""
        if not self.is_shared or self.is_stale or version_of(buffer) != self.version:
            return True
        return _is_small(buffer) and self.differs(buffer)

    def differs(self, buffer: torch.Tensor) -> bool:
        """Whether it does; where the buffer is on an accelerator, that is waited for."""
        return not torch.equal(_bytes_of(self.tensor), _bytes_of(buffer))

    def fresh(self, buffer: torch.Tensor) -> torch.Tensor:
        """What may stand in the place of the buffer, and be changed."""
        return self.tensor.to(buffer.device, copy=True)


class Copies:
    """Of the buffers of blocks.

    A buffer that does not change has one copy in host memory, which costs forwards nothing. One
    that changes is copied where it is, for each forward. Versions tell of changes; of those that
    they do not tell of, a look at what is small, and at the rest in some forwards.
    """

    def __init__(self) -> None:
        self._shared: MutableMapping[torch.Tensor, Copy] = WeakTensorKeyDictionary()
        self._made: WeakKeyDictionary[nn.Module, Counter[str]] = WeakKeyDictionary()
        self._forwards: WeakKeyDictionary[nn.Module, Counter[tuple[bool, ...]]] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        # A copy of a model, or a pickle of it, has buffers of its own.
        return Copies, ()

    def is_lesson(self, block: nn.Module, modes: tuple[bool, ...]) -> bool:
        """Whether to look at all buffers in this forward: in the first, the second, the fourth ...
        of those in which the same modules are in training.
        """
        counts = self._forwards.setdefault(block, Counter())
        counts[modes] += 1
        return counts[modes].bit_count() == 1

    def of(self, module: nn.Module, name: str, *, is_lesson: bool) -> Copy:
        """A copy of a buffer, as it is now."""
        buffer = module._buffers[name]
        assert buffer is not None  # noqa: S101 — the caller has looked
        version = version_of(buffer)
        shared = self._shared.get(buffer)
        if shared is not None and shared.version == version:
            looks = is_lesson or _is_small(buffer)
            shared.is_stale = shared.is_stale or (looks and shared.differs(buffer))
            if not shared.is_stale:
                return shared
        made = self._made.setdefault(module, Counter())
        made[name] += 1
        if made[name] > _TRIES or not _is_plain(buffer) or _is_told_late(buffer):
            return Copy(buffer.detach().clone(), version, is_shared=False)
        with nullcontext() if _is_small(buffer) else unmetered():
            copied = buffer.detach().to("cpu", copy=True)
        self._shared[buffer] = Copy(copied, version, is_shared=True)
        return self._shared[buffer]

    def learn(self, module: nn.Module, name: str, buffer: torch.Tensor, copy: Copy) -> None:
        """Look whether a forward has changed a buffer and said nothing."""
        if copy.is_shared and version_of(buffer) == copy.version and copy.differs(buffer):
            copy.is_stale = True
            self._made[module][name] = _TRIES


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() * buffer.itemsize <= _SMALL


def _is_told_late(buffer: torch.Tensor) -> bool:
    """Whether looking at a small buffer takes longer than copying it."""
    return _is_small(buffer) and buffer.device.type != "cpu"


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether its bytes can be looked at."""
    return (
        type(buffer) is torch.Tensor
        and buffer.layout is torch.strided
        and buffer.device.type != "meta"
        and not buffer.is_quantized
        and not is_functorch_wrapped_tensor(buffer)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
