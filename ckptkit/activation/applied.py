"""Forwards of blocks that stand in the place of their own, until that is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

Way = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
"""From a block's name, the block and its forward to the forward that takes its place."""


class Undo:
    """Gives the blocks their own forwards back, when it is called."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[nn.Module, Any]] = {}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks whose forward is another now."""
        return tuple(self._blocks)

    def put(self, blocks: Mapping[str, nn.Module], way: Way) -> None:
        """Let blocks go another way."""
        for name, block in blocks.items():
            own = vars(block).get("forward")
            plain = block.forward
            self._blocks[name] = block, own
            # Not setattr: a compiled module passes that on to what it compiles.
            vars(block)["forward"] = way(name, block, plain)

    def __call__(self) -> None:
        """Safe to call twice."""
        for block, own in self._blocks.values():
            if own is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = own
        self._blocks = {}


class Checkpointed(NamedTuple):
    """`model, undo = checkpoint_activations(...)`."""

    model: Any
    undo: Undo
