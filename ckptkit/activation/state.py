"""What a block has beside its inputs, which recomputing finds as its forward found it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckptkit.activation.buffers import Buffers, buffers_of, put_buffers
from ckptkit.activation.copies import Copies, version_of
from ckptkit.activation.memory import storages_of
from ckptkit.errors import UsageError


class StateGuard(AbstractContextManager[None]):
    """Of one forward of a block: a context for its recomputations, entered for each.

    They run on the buffers that the forward began with, in its mode, and the block has its own
    afterwards. Of parameters there are no copies: that they have changed is an error.
    """

    def __init__(self, block: nn.Module, copies: Copies) -> None:
        modules = list(block.modules())
        self._block = block
        self._weights = versions_of(modules)
        self._modes = [(module, module.training) for module in modules]
        self._modes_after: list[tuple[nn.Module, bool]] = []
        self._before = buffers_of(modules)
        self._copies = copies
        self._is_lesson = bool(self._before) and copies.is_lesson(
            block, tuple(module.training for module, _ in self._before)
        )
        self._copied = [
            (module, name, buffer, copies.of(module, name, is_lesson=self._is_lesson))
            for module, buffers in self._before
            for name, buffer in buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self._after: list[tuple[nn.Module, Buffers]] = []
        self._replaced: list[tuple[torch.Tensor, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What the forward runs in."""
        yield
        if self._is_lesson:
            for copied in self._copied:
                self._copies.learn(*copied)

    def __enter__(self) -> None:
        self._check_weights()
        needed = {
            id(each): (each, copy) for _, _, each, copy in self._copied if copy.is_needed(each)
        }
        self._replaced = [(buffer, version_of(buffer)) for buffer, _ in needed.values()]
        changed = [each for each, copy in needed.values() if version_of(each) != copy.version]
        memories = [storage._cdata for each in changed for storage in storages_of(each)]
        _check(are_apart=len(memories) == len(set(memories)))
        fresh = {key: copy.fresh(buffer) for key, (buffer, copy) in needed.items()}
        self._modes_after = [(module, module.training) for module, _ in self._modes]
        _put_modes(self._modes)
        self._after = [(module, dict(module._buffers)) for module, _ in self._before]
        put_buffers(
            [
                (module, {name: fresh.get(id(each), each) for name, each in buffers.items()})
                for module, buffers in self._before
            ]
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _put_modes(self._modes_after)
        put_buffers(self._after)
        self._after = []
        _check(are_apart=all(version_of(buffer) == version for buffer, version in self._replaced))

    def _check_weights(self) -> None:
        for weight, version in self._weights:
            if version_of(weight) != version:
                names = [name for name, each in self._block.named_parameters() if each is weight]
                raise UsageError(
                    "a parameter of a block was changed in place after its forward began, and "
                    "before its backward, which computes the block again",
                    where=", ".join(names),
                    hint="change parameters only after the backward; what the forward itself "
                    "changes belongs in a buffer",
                )


def _put_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.training = training


def _check(*, are_apart: bool) -> None:
    if not are_apart:
        raise UsageError(
            "a block changes a buffer that is known to it by something else than its name",
            hint="let no other buffer or attribute view its memory, or leave the block out",
        )


def versions_of(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, int]]:
    """The parameters of modules, and how often each was changed in place."""
    # Not those of DTensors: FSDP2 exchanges them meanwhile.
    return [
        (weight, version_of(weight))
        for module in modules
        for weight in module._parameters.values()
        if weight is not None and type(weight) in (torch.Tensor, nn.Parameter)
    ]
