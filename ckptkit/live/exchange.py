"""Whole tensors on rank 0 out of the parts that ranks hold, and back: collectives of a process
group, the default one where none is said, so every rank makes the same calls, in the thread that
trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ckptkit.checkpoint.ranks import OneRank
from ckptkit.errors import CkptkitError
from ckptkit.format.encoding import dumps
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.parts import LiveTensor, indices
from ckptkit.live.state.ranks import GroupRanks, World, listed, wire
from ckptkit.live.state.tensors import bytes_of
from ckptkit.live.state.topology import Topology
from ckptkit.live.state.trees import no_tensor, put_tensors, tensors_inline
from ckptkit.model import Layout, Part, Replicate, Stage, parse_placement

_SHOWN = 4


class TensorLayout(NamedTuple):
    """How a tensor lies on the ranks, as one of them says it: plain values, which can be told."""

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...]
    """By axis; replicated along those that are not there."""
    is_own: bool = True
    """Whether they say what each rank holds; otherwise a collective of all ranks gathers it."""

    @classmethod
    def of(cls, held: LiveTensor) -> TensorLayout:
        """What a rank says of a tensor that it holds."""
        cut = [(k, str(p)) for k, p in held.placements.items() if not isinstance(p, Replicate)]
        return cls(held.shape, str(held.local.dtype), tuple(sorted(cut)), held.own is None)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return found

    def of_stage(self, *, is_kept: bool) -> TensorLayout:
        """A layout with only what says its pipeline stage, so that every rank of that has it whole;
        or with all else, as several stages may have one tensor.
        """
        staged = (isinstance(parse_placement(text), Stage) for _, text in self.placements)
        kept = [pair for pair, of in zip(self.placements, staged, strict=True) if of is is_kept]
        return self._replace(placements=tuple(kept))

    def __str__(self) -> str:
        cut = ", ".join(f"{axis}: {placement}" for axis, placement in self.placements)
        return f"{self.dtype} {self.shape}{f' ({cut})' if cut else ''}"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What all ranks have together; the same on every rank."""

    tensors: dict[str, list[TensorLayout]] = field(default_factory=dict)
    """Several only for a tensor of several pipeline stages."""
    values: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


class Exchange:
    """The ranks of a job, which give tensors to rank 0 and get them from it."""

    def __init__(
        self, world: World, topology: Topology, group: dist.ProcessGroup | None = None
    ) -> None:
        self._world = world
        self._topology = topology
        self._group = group
        self._ranks = GroupRanks(world, group) if world.size > 1 else OneRank()

    def agree(
        self,
        held: Mapping[str, LiveTensor],
        *,
        values: Mapping[str, Any] | None = None,
        tied: Mapping[str, str] | None = None,
        problem: str = "",
        is_involved: bool = True,
        where: str = "",
    ) -> Plan:
        """Put together what all ranks have; raises on every rank what one of them found wrong."""
        for name, each in held.items():
            part = each.part(self._topology)
            if not part.is_empty and part.shape != tuple(each.local.shape):
                problem = problem or (
                    f"{name}: the rank should hold {part.shape} of {each.shape}, "
                    f"but has {tuple(each.local.shape)}"
                )
        # What one rank says before tensors travel. A stage knows only its own parameters: whether
        # this one knows what the call is about.
        spoken: dict[str, Any] = {"problem": problem, "is_involved": is_involved}
        if not problem:  # otherwise the others hear of that only
            spoken["tensors"] = {name: tuple(TensorLayout.of(each)) for name, each in held.items()}
            spoken["values"], spoken["tied"] = dict(values or {}), dict(tied or {})
            spoken["strategy"] = str(self._topology.strategy)
        if self._world.size == 1:
            plan, problem = self._merged([spoken])
        else:
            try:
                spoken["values"] = tensors_inline(spoken.get("values", {}))
                dumps(spoken)
            except CkptkitError as error:  # the others wait to hear of it
                spoken = {"problem": str(error), "is_involved": is_involved}
            heard = self._ranks.collect(spoken)

            def merged() -> tuple[Any, ...]:
                plan, problem = self._merged(heard)
                spreads = {n: list(map(tuple, several)) for n, several in plan.tensors.items()}
                return spreads, plan.values, plan.tied, problem

            tensors, plain, aliases, problem = self._ranks.share(merged)
            spreads = {n: [TensorLayout(*each) for each in s] for n, s in tensors.items()}
            plan = Plan(spreads, put_tensors(plain, no_tensor, ""), aliases)
        if problem:
            raise StateMismatchError(problem, where=where)
        return plan

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, with its tensors; what the others pass is ignored."""
        if self._world.size == 1:
            return value
        told = self._ranks.share(lambda: tensors_inline(value))
        return put_tensors(told, no_tensor, "")

    def gather(self, plan: Plan, held: Mapping[str, LiveTensor]) -> dict[str, torch.Tensor] | None:
        """The whole tensors of a plan, in host memory, on rank 0; None on the others."""
        found: dict[str, torch.Tensor] = {}
        for name, spreads in plan.tensors.items():
            layout = self._layout(name, spreads[0])
            mine = held[name].moved(self._topology) if name in held else None
            whole = None
            if self._world.rank == 0:
                whole = torch.empty(spreads[0].shape, dtype=spreads[0].torch_dtype, device="cpu")
                found[name] = whole
            for holder in layout.distinct_ranks():
                part = layout.part(holder)
                if not part.is_empty:
                    self._fetch(mine, holder, part, whole)
        return found if self._world.rank == 0 else None

    def hand_out(
        self, plan: Plan, held: Mapping[str, LiveTensor], wholes: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill what every rank holds of the tensors of a plan, which rank 0 has whole."""
        for name, spreads in plan.tensors.items():
            for spread in spreads:
                layout = self._layout(
                    name, spread if spread.is_own else spread.of_stage(is_kept=True)
                )
                for rank in range(self._world.size):
                    part = layout.part(rank)
                    if part.is_empty:
                        continue
                    if self._world.rank == 0:
                        self._give(held.get(name), rank, part, wholes[name].detach())
                    elif self._world.rank == rank:
                        _fill(held[name], self._received(part.shape, held[name].local.dtype, 0))

    def _fetch(
        self, held: LiveTensor | None, holder: int, part: Part, whole: torch.Tensor | None
    ) -> None:
        """Let rank 0 have the part of a holder. A call for each part, as that is freed at its end:
        beside the whole tensor there may be no room for two.
        """
        if whole is None:
            if holder == self._world.rank and held is not None:
                self._send(held.local, 0)
            return
        if held is not None and holder == 0:
            values = held.local
        else:
            values = self._received(part.shape, whole.dtype, holder)
        for there, here in indices(part, tuple(whole.shape)):
            whole[there] = values[here].to("cpu")

    def _give(self, held: LiveTensor | None, rank: int, part: Part, whole: torch.Tensor) -> None:
        """Let a rank have its part of a tensor; freed as in `_fetch`."""
        values = torch.empty(part.shape, dtype=whole.dtype, device="cpu")
        for there, here in indices(part, tuple(whole.shape)):
            values[here] = whole[there].to("cpu")
        if rank != 0:
            self._send(values, rank)
        elif held is not None:
            _fill(held, values)

    def _send(self, values: torch.Tensor, rank: int) -> None:
        dist.send(bytes_of(values.to(wire(self._group))), group=self._group, group_dst=rank)

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, device=wire(self._group))
        dist.recv(bytes_of(values), group=self._group, group_src=rank)
        return values

    def _layout(self, name: str, spread: TensorLayout) -> Layout:
        placements = {axis: parse_placement(text) for axis, text in spread.placements}
        return self._topology.layout(name, spread.shape, placements)

    def _merged(self, heard: Sequence[Mapping[str, Any]]) -> tuple[Plan, str]:
        """The plan, and all that is wrong."""
        problems: dict[str, list[int]] = {}
        plan = Plan()
        held: list[dict[str, TensorLayout]] = []
        for rank, spoken in enumerate(heard):
            if spoken["problem"]:
                problems.setdefault(spoken["problem"], []).append(rank)
            held.append({n: TensorLayout(*each) for n, each in spoken.get("tensors", {}).items()})
            for name, spread in held[rank].items():
                known = plan.tensors.setdefault(name, [])
                in_stage = spread.of_stage(is_kept=False)[:-1]
                if known and known[0].of_stage(is_kept=False)[:-1] != in_stage:
                    what = f"{name} is {spread}, on another rank it is {known[0]}"
                    problems.setdefault(what, []).append(rank)
                elif spread not in known:
                    known.append(spread)
            values = spoken.get("values", {})
            plan.values.update({k: v for k, v in values.items() if k not in plan.values})
            plan.tied.update(spoken.get("tied", {}))
        first = heard[0].get("strategy", "")
        for rank, spoken in enumerate(heard) if plan.tensors else ():
            if spoken.get("strategy", first) != first:
                what = f"its stage is spread over {spoken['strategy']}, that of rank 0 over "
                what += f"{first}: save and load them with a Checkpointer"
                problems.setdefault(what, []).append(rank)
        if not problems and not any(spoken["is_involved"] for spoken in heard):
            return plan, "no rank has a parameter of this name"
        every = [(name, spread) for name, several in plan.tensors.items() for spread in several]
        for name, spread in every if not problems else ():
            layout = self._layout(name, spread)
            for rank, mine in enumerate(held):
                if mine.get(name) != spread and not layout.part(rank).is_empty:
                    what = f"there is no {name}, which other ranks have"
                    problems.setdefault(what, []).append(rank)
        lines = []
        for problem, ranks in problems.items():
            who = f"rank {listed(ranks, _SHOWN)}: " if len(heard) > 1 else ""
            lines.append(f"{who}{problem}")
        more = f"\nand {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        return plan, "\n".join(lines[:_SHOWN]) + more


def _fill(held: LiveTensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        if held.own is None:
            held.local.copy_(values)
            return
        for there, here in indices(held.own, held.shape):
            held.local[here] = values[there].to(held.local.device)
