"""The questions asked about one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ckptkit.live.adapters.adapter import Placements
from ckptkit.live.groups import Group

Names = Mapping[nn.Parameter, str]
"""The canonical name of every parameter of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class StateEntry:
    """One value that an optimizer keeps for a parameter."""

    parameter: str
    key: str
    value: Any
    shape: tuple[int, ...] | None = None
    placements: Placements | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds for one key of one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_like_parameter: bool
    """Whether it has an element for each of the parameter's."""
    is_wrapper: bool = False
    """Whether it is made of several tensors."""


SavedState = Mapping[str, Mapping[str, Any]]
"""By parameter and key; empty for a parameter that had no state. A list or a dictionary that an
optimizer keeps is one here too, with a `Saved` in the place of each tensor."""


class OptimizerAdapter(Protocol):
    """One optimizer of one kind."""

    @property
    def kind(self) -> str:
        """The name of its class, or of the class that does the steps."""

    def groups(self) -> list[Group]:
        """The lines of ranks over which it spreads its state."""

    def entries(self, names: Names) -> list[StateEntry]:
        """All that it keeps on this rank, tensors in memory that a load may fill."""

    def options(self, names: Names) -> list[dict[str, Any]]:
        """Its parameter groups: the names below `params`, and the options below `options`."""

    def prepare(self, names: Names, saved: SavedState) -> None:
        """Make memory for what is saved and not there yet, and drop what is not saved; parameters
        that are not named are left as they are.
        """

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over the tensors that were filled, and by parameter other values and the options."""
