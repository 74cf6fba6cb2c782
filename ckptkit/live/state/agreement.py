"""What the ranks of a job have to know of each other before a save or a load: told over the store,
and only where stages or owners make them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import InvalidNameError
from ckptkit.format.leaves import canonical
from ckptkit.live.state.topology import Topology

Documents = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have together."""

    optimizers: Documents
    """On rank 0: one document for each optimizer, of the parameters of all ranks."""
    elsewhere: frozenset[str]
    """The tensors of this rank that an earlier stage has too, and saves."""
    names: frozenset[str]
    """On rank 0: the tensors of all stages."""
    values: Mapping[str, Any]
    """On rank 0: the extra state of all stages."""


def put_together(
    ranks: Ranks,
    topology: Topology,
    names: Iterable[str],
    optimizers: Documents,
    values: Mapping[str, Any] | None = None,
    fingerprint: Callable[[str], object] | None = None,
) -> Agreement:
    """Put together what stages and owners know; a collective only where there are such.

    Stages that share a name are one tensor, tied, of which the first stage's is saved. With
    `fingerprint` that is made sure: it tells what a tensor of this rank holds.
    """
    kinds = {axis.kind for axis in topology.strategy.mesh.axes if axis.size > 1}
    mine, values = frozenset(names), values or {}
    if not kinds & {"pp", "zero1"} or ranks.world_size == 1:
        return Agreement(_merged([optimizers]), frozenset(), mine, values)
    own = topology.stage
    coords = topology.strategy.mesh.coords(topology.rank)
    place = [coord for axis, coord in enumerate(coords) if axis != topology.pipeline]
    spoken = {"stage": own, "names": sorted(mine), "optimizers": optimizers, "values": values}
    if any(place):
        # The first rank of a stage speaks for it. The others add only the optimizer's values that
        # they own, which it does not have.
        own_values = [{**document, "groups": []} for document in optimizers]
        spoken = {"stage": 0, "names": [], "optimizers": own_values, "values": {}}
    heard = ranks.collect(spoken)
    stages: dict[str, int] = {}
    several: dict[str, int] = {}
    for document in sorted(heard, key=lambda d: d["stage"]):
        for name in document["names"]:
            if name in stages:
                several[name] = stages[name]
            stages.setdefault(name, document["stage"])
    shared = ranks.share(lambda: several)
    if shared and fingerprint is not None:
        contents = {name: fingerprint(name) for name in sorted(mine & shared.keys())}
        # The ranks of a stage hold different parts: those at one place of each stage are compared.
        if different := ranks.agree([place, contents], _first_different):
            raise InvalidNameError(
                "two pipeline stages have different tensors of this name",
                value=different,
                hint="stages keep the names of the whole model: an nn.ModuleDict of its layers "
                "does",
            )
    elsewhere = frozenset(name for name, stage in shared.items() if name in mine and stage != own)
    return Agreement(
        _merged([document["optimizers"] for document in heard]),
        elsewhere,
        frozenset(stages),
        {name: value for document in heard for name, value in document["values"].items()},
    )


def _first_different(heard: Sequence[tuple[list[int], Mapping[str, object]]]) -> str:
    """The first name under which ranks at one place of their stages hold different tensors."""
    known: dict[tuple[str, str], object] = {}
    return min(
        (
            name
            for place, contents in heard
            for name, content in contents.items()
            if known.setdefault((name, str(place)), content) != content
        ),
        default="",
    )


def _merged(said: Sequence[Documents]) -> Documents:
    """One document for each optimizer, of the parameters of all ranks."""
    found: Documents = []
    for documents in said:
        for number, document in enumerate(documents):
            if number == len(found):
                found.append({"kind": document["kind"], "groups": [], "values": {}})
            found[number]["values"] |= document["values"]
            known = found[number]["groups"]
            taken = {name for group in known for name in group["params"]}
            for at, group in enumerate(document["groups"]):
                fresh = [name for name in group["params"] if name not in taken]
                if not fresh and group["params"]:
                    continue
                # Stages have the groups of one optimizer in one order; others stay apart.
                same = known[at] if at < len(known) else None
                if same is not None and canonical(same["options"]) == canonical(group["options"]):
                    same["params"] += fresh
                else:
                    known.append({"params": fresh, "options": group["options"]})
    return found
