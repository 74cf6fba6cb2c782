"""`ZeroRedundancyOptimizer` (ZeRO-1): each rank keeps the whole state of some parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from ckptkit.live.groups import Group, group_of
from ckptkit.live.optimizers.adapter import Names, SavedState, StateEntry
from ckptkit.live.optimizers.plain import PlainOptimizer
from ckptkit.live.topology import Topology
from ckptkit.model import Placement

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


T = TypeVar("T")


class Zero1Optimizer(PlainOptimizer):
    """A `ZeroRedundancyOptimizer`: nothing is gathered, every rank saves what it keeps."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        # torch annotates little of what is asked of it here.
        self._zero = cast("Any", optimizer)
        self._zero._check_overlap_initialized()

    @staticmethod
    def recognises(optimizer: Optimizer) -> bool:
        """Whether it is one."""
        # Whoever has one has imported it; importing it here would take a while, and warns.
        module = sys.modules.get(_MODULE)
        return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)

    @property
    def kind(self) -> str:
        """The class of the optimizer inside."""
        return type(self._zero.optim).__name__

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """What this rank keeps."""
        return self._zero.optim.state  # type: ignore[no-any-return]

    def groups(self) -> list[Group]:
        """The ranks that share the parameters out among them."""
        return [group_of("zero1", self._zero.process_group)]

    def entry(self, name: str, key: str, value: Any, parameter: nn.Parameter) -> StateEntry:
        """An entry that only its owner has."""
        coordinate = self._zero._param_to_rank[parameter]
        ranks = group_of("zero1", self._zero.process_group).ranks

        def placements(topology: Topology) -> Mapping[str, Placement]:
            return topology.owner(ranks, coordinate, name)

        shape = tuple(value.shape) if hasattr(value, "shape") else None
        return StateEntry(name, key, value, shape, placements)

    def prepare(self, names: Names, saved: SavedState) -> None:
        """Make the state of the parameters that this rank owns."""
        super().prepare(names, self._owned(names, saved))

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """As for any other, and the optimizer inside gets the options too."""
        super().absorb(names, entries, self._owned(names, values), options)
        self._zero._sync_param_groups(self._zero.param_groups, self._zero.optim.param_groups)

    def _owned(self, names: Names, of_all: Mapping[str, T]) -> dict[str, T]:
        """Of something by parameter, what this rank keeps."""
        owner = self._zero._param_to_rank
        mine = {names[p] for p in self._parameters() if owner[p] == self._zero.rank}
        return {name: value for name, value in of_all.items() if name in mine}
