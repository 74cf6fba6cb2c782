"""The values of a step that are no tensors, for another number of ranks and under new names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.checkpoint.reshard.selection import Choice, Selection
from ckptkit.errors import UsageError
from ckptkit.format.names import ALIKE, MODEL, OPTIMIZER, REFERENCE, WRAPPED, escape, split
from ckptkit.format.objects import ObjectInfo, share_of_items, total


def chosen_objects(
    objects: Sequence[ObjectInfo], choice: Choice, selection: Selection
) -> tuple[ObjectInfo, ...]:
    """The objects that go over, with the names that arrays have in the target."""
    found = []
    for item in objects:
        group, _, rest = item.name.partition("/")
        if group == OPTIMIZER and not rest and not selection.optimizer:
            continue
        if _is_gone(item.value, choice.leads):
            continue
        if group == ALIKE and rest in choice.changed | choice.left_out:
            continue
        if group == WRAPPED:
            found += _record(item, rest, choice)
            continue
        name = f"{group}/{choice.names.get(rest, rest)}" if group == ALIKE else item.name
        value = _renamed_values(item, choice)
        found.append(ObjectInfo(name, item.semantics, value, item.ranks))
    return tuple(found)


def _record(item: ObjectInfo, name: str, choice: Choice) -> list[ObjectInfo]:
    """What arrays make together, if they go over."""
    parts = item.value.get("inner") if isinstance(item.value, dict) else None
    ends = [f"%2F{escape(str(part))}" for part in parts] if isinstance(parts, list) else []
    if choice.changed.intersection(name + end for end in ends):
        raise UsageError(
            "a part of a tensor that is made of several cannot be cast or changed", where=name
        )
    new = {choice.names[name + end].removesuffix(end) for end in ends if name + end in choice.names}
    return [ObjectInfo(f"{WRAPPED}/{each}", item.semantics, item.value) for each in sorted(new)]


def parameter_order(objects: Sequence[ObjectInfo]) -> dict[str | None, int]:
    """The parameters in the order in which optimizers have them, as far as they say so."""
    found: dict[str | None, int] = {}
    for item in objects:
        if item.name == OPTIMIZER and isinstance(item.value, list):
            groups = [d.get("groups") for d in item.value if isinstance(d, dict)]
            for group in [g for each in groups if isinstance(each, list) for g in each]:
                names = group.get("params") if isinstance(group, dict) else None
                for name in names if isinstance(names, list) else []:
                    found.setdefault(f"{MODEL}/{name}", len(found))
    return found


def objects_of(objects: Sequence[ObjectInfo], rank: int, world_size: int) -> tuple[ObjectInfo, ...]:
    """What one rank of the target says of the objects, so that together they say the same."""
    shares = (_share(item, rank, world_size) for item in objects)
    return tuple(share for share in shares if share is not None)


def _share(item: ObjectInfo, rank: int, world_size: int) -> ObjectInfo | None:
    if item.semantics == "replicated":
        return item if rank == 0 else None
    if len(item.value) == world_size:
        return ObjectInfo(item.name, item.semantics, item.value[rank])
    if item.semantics == "per_rank":
        # They belong to ranks that do not exist here: kept whole, for a job of that size.
        count = len(item.value)
        return ObjectInfo(item.name, item.semantics, item.value, count) if rank == 0 else None
    if item.semantics == "split":
        share = share_of_items(item.value, rank, world_size)
        return ObjectInfo(item.name, item.semantics, share)
    # Not in equal shares, which need not add up to the same number again.
    whole = total(item.value)
    return ObjectInfo(item.name, item.semantics, whole if rank == 0 else _nothing(whole))


def _nothing(whole: Any) -> Any:
    return np.zeros_like(whole) if isinstance(whole, np.ndarray) else type(whole)(0)


def _renamed_values(item: ObjectInfo, choice: Choice) -> Any:
    if choice.is_all_as_before:
        return item.value
    if item.name == OPTIMIZER and item.semantics == "replicated":
        # The containers of optimizers refer to arrays too.
        return _pointing(_optimizers(item.value, _parameters(choice)), choice.leads)
    return _pointing_at(item.value, choice.leads)


def _parameters(choice: Choice) -> dict[str, str]:
    """The parameters that go over, by their names inside of the model."""
    found = {}
    for name, new in choice.leads.items():
        group, *nodes = split(name)
        if group == MODEL and nodes:
            found["/".join(nodes)] = "/".join(split(new)[1:])
    return found


def _optimizers(value: Any, names: Mapping[str, str]) -> Any:
    """What optimizers say, of the parameters that are left and by their new names."""
    if not isinstance(value, list):
        return value
    found = []
    for document in value:
        if not isinstance(document, dict):
            return value
        changed = dict(document)
        changed["groups"] = [
            {**group, "params": [names[p] for p in group["params"] if p in names]}
            if isinstance(group, dict) and isinstance(group.get("params"), list)
            else group
            for group in document.get("groups", [])
        ]
        if isinstance(document.get("values"), dict):
            values = document["values"]
            changed["values"] = {names[p]: values[p] for p in values if p in names}
        found.append(changed)
    return found


def _pointing(value: Any, names: Mapping[str, str]) -> Any:
    """A nested value whose references to arrays lead to those of the target; what leads to none
    goes.
    """
    if isinstance(value, dict):
        return {key: _pointing_at(v, names) for key, v in value.items() if not _is_gone(v, names)}
    if isinstance(value, list):
        return [_pointing_at(v, names) for v in value if not _is_gone(v, names)]
    if isinstance(value, tuple):
        return tuple(_pointing_at(v, names) for v in value if not _is_gone(v, names))
    return value


def _pointing_at(value: Any, names: Mapping[str, str]) -> Any:
    if _is_reference(value):
        return {REFERENCE: names[value[REFERENCE]]}
    return _pointing(value, names)


def _is_gone(value: Any, names: Mapping[str, str]) -> bool:
    return _is_reference(value) and value[REFERENCE] not in names


def _is_reference(value: Any) -> bool:
    return (
        isinstance(value, dict) and list(value) == [REFERENCE] and isinstance(value[REFERENCE], str)
    )
