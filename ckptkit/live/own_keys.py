"""Keys that only some ranks have in the nested dictionaries of `state=`, such as `dp_rank_3`: each
is an object of its own, which says whose it is, and its tensors are those of the first that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.format.names import OWN, escape
from ckptkit.format.objects import ObjectInfo
from ckptkit.live.agree import Keys
from ckptkit.live.held import Held
from ckptkit.live.snapshot import Snapshot
from ckptkit.live.trees import arrays_in, value_at, with_value, without_key
from ckptkit.model import Owner, Placement


def own_apart(
    snapshot: Snapshot,
    objects: Mapping[str, object],
    tensors: Sequence[Held],
    some: Mapping[Keys, list[int]],
) -> tuple[dict[str, object], list[Held]]:
    """The objects and tensors to save, where some ranks have keys that others have not."""
    found = dict(objects)
    owners: dict[str, dict[str, Placement]] = {}
    mesh = snapshot.topology.strategy.mesh
    for (group, *keys), ranks in some.items():
        if snapshot.topology.rank not in ranks:
            continue
        value = value_at(found[str(group)], keys)
        name = "/".join([OWN, *(escape(str(key) or "_") for key in (group, *keys))])
        found[name] = {"group": group, "keys": keys, "ranks": ranks, "value": value}
        if keys:
            found[str(group)] = without_key(found[str(group)], keys)
        else:
            del found[str(group)]
        coords = zip(mesh.axes, mesh.coords(ranks[0]), strict=True)
        owner: dict[str, Placement] = {a.name: Owner(at) for a, at in coords if a.size > 1}
        owners |= dict.fromkeys(arrays_in(value, name), owner)
    # What is cut over the ranks that have it says so itself.
    mine = [
        replace(held, placements=owners[held.name] | dict(held.placements), alike=frozenset())
        if held.name in owners
        else held
        for held in tensors
    ]
    return found, mine


def with_own(
    objects: Mapping[str, ObjectInfo], here: Mapping[str, object], rank: int, world_size: int
) -> dict[str, ObjectInfo]:
    """The objects of a step as they are for one rank: with the keys that it has too, or had."""
    found = dict(objects)
    for name, item in objects.items():
        if not name.startswith(f"{OWN}/"):
            continue
        group, keys, ranks, value = parts_of(item)
        was_mine = rank in ranks and max(ranks) < world_size
        if was_mine or (group in here and value_at(here[group], keys) is not None):
            known = found.get(group)
            tree = with_value(None if known is None else known.value, keys, value)
            found[group] = ObjectInfo(group, "replicated", tree)
    return found


def parts_of(item: ObjectInfo) -> tuple[str, list[Any], list[int], Any]:
    """The group, the keys, the ranks and the value of what some ranks have of their own."""
    value = item.value
    wrong = not isinstance(value, dict) or value.keys() != {"group", "keys", "ranks", "value"}
    if wrong or not isinstance(value["group"], str) or not isinstance(value["keys"], list):
        raise FormatError("not what a save writes", where=f"objects.{item.name}", value=value)
    ranks = value["ranks"]
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise FormatError("not a list of ranks", where=f"objects.{item.name}", value=ranks)
    return value["group"], value["keys"], ranks, value["value"]
