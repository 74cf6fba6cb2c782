"""What the ranks of a job have to know of each other before a save or a load: told over the store,
and only where stages or owners make them differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import InvalidNameError
from ckptkit.format.leaves import canonical, dumps
from ckptkit.live.state.topology import Topology
from ckptkit.live.state.trees import Keys, is_mark

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


def agree(
    barrier: Ranks,
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
    if not kinds & {"pp", "zero1"} or barrier.world_size == 1:
        return Agreement(merged(optimizers_of=[optimizers]), frozenset(), mine, values)
    spoken = {"stage": 0, "names": [], "optimizers": _values_only(optimizers), "values": {}}
    if _speaks_for_its_stage(topology):
        stage = 0 if topology.pipeline is None else topology.coordinate(topology.pipeline)
        spoken = {"names": sorted(mine), "optimizers": optimizers, "values": values}
        spoken["stage"] = stage
    heard = barrier.collect(spoken)
    stages: dict[str, int] = {}
    several: dict[str, int] = {}
    for document in sorted(heard, key=lambda d: d["stage"]):
        for name in document["names"]:
            if name in stages:
                several[name] = stages[name]
            stages.setdefault(name, document["stage"])
    shared = barrier.share(lambda: several)
    if shared and fingerprint is not None:
        _check_tied(barrier, topology, {n: fingerprint(n) for n in sorted(mine & shared.keys())})
    own = 0 if topology.pipeline is None else topology.coordinate(topology.pipeline)
    elsewhere = frozenset(name for name, stage in shared.items() if name in mine and stage != own)
    return Agreement(
        merged(optimizers_of=[document["optimizers"] for document in heard]),
        elsewhere,
        frozenset(stages),
        {name: value for document in heard for name, value in document["values"].items()},
    )


def _check_tied(ranks: Ranks, topology: Topology, mine: dict[str, object]) -> None:
    """Raise on all ranks if stages have different tensors of one name."""
    coords = topology.strategy.mesh.coords(topology.rank)
    # The ranks of a stage hold different parts: those at one place of each stage are compared.
    place = [coord for axis, coord in enumerate(coords) if axis != topology.pipeline]

    def first_different(heard: list[Any]) -> str:
        known: dict[tuple[str, str], object] = {}
        return min(
            (
                name
                for there, said in heard
                for name, content in said.items()
                if known.setdefault((name, str(there)), content) != content
            ),
            default="",
        )

    found = ranks.agree([place, mine], first_different)
    if found:
        raise InvalidNameError(
            "two pipeline stages have different tensors of this name",
            value=found,
            hint="stages keep the names of the whole model: an nn.ModuleDict of its layers does",
        )


def merged(*, optimizers_of: Sequence[Documents]) -> Documents:
    """One document for each optimizer, of the parameters of all ranks."""
    found: Documents = []
    for documents in optimizers_of:
        for number, document in enumerate(documents):
            if number == len(found):
                found.append({"kind": document["kind"], "groups": [], "values": {}})
            found[number]["values"] |= document["values"]
            _merge_groups(found[number]["groups"], document["groups"])
    return found


def _merge_groups(known: Documents, groups: Documents) -> None:
    taken = {name for group in known for name in group["params"]}
    for number, group in enumerate(groups):
        fresh = [name for name in group["params"] if name not in taken]
        if not fresh and group["params"]:
            continue
        # Stages have the groups of one optimizer in one order; those that differ stay apart.
        same = known[number] if number < len(known) else None
        if same is not None and canonical(same["options"]) == canonical(group["options"]):
            same["params"] += fresh
        else:
            known.append({"params": fresh, "options": group["options"]})


def _speaks_for_its_stage(topology: Topology) -> bool:
    coords = topology.strategy.mesh.coords(topology.rank)
    return not any(coord for axis, coord in enumerate(coords) if axis != topology.pipeline)


def _values_only(optimizers: Documents) -> Documents:
    return [{**document, "groups": []} for document in optimizers]


def keys_of_some(ranks: Ranks, trees: Mapping[str, Any], first: bytes) -> dict[Keys, list[int]]:
    """What only some ranks have in their nested dictionaries, the outermost keys, with the ranks
    that have them. `first` is the fingerprint of rank 0's keys.
    """
    differs = fingerprint_of_keys(trees) != first
    if not ranks.agree(differs, any):
        return {}

    def of_some(heard: list[Any]) -> list[tuple[Keys, list[int]]]:
        holders: dict[Keys, list[int]] = {}
        for rank, said in enumerate(heard):
            for keys in said:
                holders.setdefault(keys, []).append(rank)
        some = {keys: those for keys, those in holders.items() if len(those) < ranks.world_size}
        return [(keys, those) for keys, those in some.items() if keys[:-1] not in some]

    return dict(ranks.agree(list(_keys(trees)), of_some))


def fingerprint_of_keys(trees: Mapping[str, Any]) -> bytes:
    """What tells whether ranks have the same keys, in whatever order."""
    keys = sorted((list(keys) for keys in _keys(trees)), key=dumps)
    return hashlib.sha256(dumps(keys)).digest()


def _keys(tree: object, above: Keys = ()) -> Iterator[Keys]:
    if isinstance(tree, dict) and not is_mark(tree):
        for key, value in tree.items():
            yield (*above, key)
            yield from _keys(value, (*above, key))
