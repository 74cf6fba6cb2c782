"""Values that are on their way into the tensors of a module while the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

_waits: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()


def settled_by(module: nn.Module, wait: Callable[[], None]) -> None:
    """Have `wait` called before the state of a module is saved or filled."""
    _waits[module] = wait


def settle(module: nn.Module) -> None:
    """Wait for what is on its way into a module."""
    for each in module.modules():
        if wait := _waits.get(each):
            wait()
