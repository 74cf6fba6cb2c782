"""Forwards of blocks that stand in the place of their own, until that is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ckptkit.errors import UsageError

Way = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
"""From a block's name, the block and its forward to the forward that takes its place."""


class Undo:
    """Gives the blocks their own forwards back, when it is called.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> _, undo = checkpoint_activations(model, "full", blocks=nn.Linear)
    >>> undo.blocks
    ('0', '1')
    >>> undo()
    >>> undo.blocks
    ()
    """

    def __init__(self) -> None:
        self._blocks: dict[str, _Put] = {}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks whose forward is another now."""
        return tuple(self._blocks)

    def put(self, blocks: Mapping[str, nn.Module], way: Way) -> None:
        """Let blocks go another way."""
        for name, block in blocks.items():
            ours = way(name, block, block.forward)
            self._blocks[name] = _Put(block, vars(block).get("forward"), ours)
            # Not setattr: a compiled module passes that on to what it compiles.
            vars(block)["forward"] = ours

    def __call__(self) -> None:
        """Safe to call twice."""
        foreign = {}
        for name, put in reversed(self._blocks.items()):
            if vars(put.block).get("forward") is not put.ours:
                foreign[name] = put
            elif put.own is None:
                del vars(put.block)["forward"]
            else:
                vars(put.block)["forward"] = put.own
        self._blocks = foreign
        if foreign:
            raise UsageError(
                "the forward of a block was changed again after it was checkpointed",
                where=", ".join(reversed(foreign)),
                hint="take that back first, and call undo again; the other blocks are undone",
            )


class _Put(NamedTuple):
    """What stands in the place of a block's own forward, which may lie on the class alone."""

    block: nn.Module
    own: Any
    ours: Any


class Checkpointed(NamedTuple):
    """`model, undo = checkpoint_activations(...)`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> model, undo = checkpoint_activations(model, "full", blocks=nn.Linear)
    >>> undo()
    """

    model: Any
    undo: Undo
