"""A step as nested dictionaries, as `torch.load` would give it: without a job, and without the
objects whose state it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.errors import FormatError
from ckptkit.format.names import (
    ALIKE,
    DATA_RANK,
    MODEL,
    OPTIMIZER,
    OWN,
    WRAPPED,
    check_used,
    escape,
    inner_name,
    matches,
    split,
    unescape,
)
from ckptkit.format.objects import whole
from ckptkit.live.extra import is_marked
from ckptkit.live.state.trees import arrays_in, parts_of, put_tensors, unmarked, with_value

Read = Callable[[list[str]], Mapping[str, torch.Tensor]]
_GONE: Any = object()


def picked(checkpoint: Checkpoint, patterns: tuple[str, ...], others: list[str]) -> list[str]:
    """The arrays that patterns pick, by name, by the name inside of their group, or with all of
    their group; a pattern that picks neither an array nor one of the `others` is refused.
    """
    names = {name: _inner(name) for name in checkpoint.arrays}
    groups = {name.split("/")[0] for name in names}
    known = [*names.items(), *((group, group) for group in groups), *((n, n) for n in others)]
    check_used(patterns, known, "the step has nothing of this name")
    return [n for n, inner in names.items() if _takes(patterns, n) or matches(patterns, n, inner)]


def nested_state(
    checkpoint: Checkpoint, patterns: tuple[str, ...] | None, read: Read
) -> dict[str, Any]:
    """What `load_state(nested=True)` gives: see there."""
    every = _values(checkpoint)
    objects = {n: v for n, v in every.items() if n.split("/")[0] not in (WRAPPED, ALIKE, OWN)}
    wrapped = {n.partition("/")[2]: _parts(n, v) for n, v in every.items() if _is_wrapper(n)}
    chosen = list(checkpoint.arrays)
    if patterns is not None:
        values = [n.removeprefix("extra/") for n in objects]
        chosen = picked(checkpoint, patterns, [*objects, *values])
    tensors = dict(read(chosen))
    placed: set[str] = set()

    def tensor_of(name: str) -> Any:
        if name in wrapped:
            parts = {key: tensor_of(f"{name}%2F{escape(key)}") for key in wrapped[name]}
            return _without_gone(parts) or _GONE
        placed.add(name)
        return tensors.get(name, _GONE)

    def filled(tree: Any, where: str) -> Any:
        return _without_gone(put_tensors(tree, tensor_of, where))

    found: dict[str, Any] = {}
    for name, value in objects.items():
        group, _, inner = name.partition("/")
        if group == "extra" and inner:
            if patterns is None or matches(patterns, name, inner):
                found.setdefault("extra", {})[inner] = unmarked(value, name)
        elif patterns is None or _takes(patterns, name) or _has_some(name, value, tensors):
            found[name] = _optimizer(value, filled) if name == OPTIMIZER else filled(value, name)
    for name in tensors.keys() - placed:
        _put(found, _path(name, wrapped), tensors[name])
    return found


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of all objects by name, those of some ranks only at their places."""
    found = {item.name: whole(item) for item in checkpoint.manifest.objects}
    for item in checkpoint.manifest.objects:
        if is_marked(item):
            # An empty mark, which no save writes, gives nothing.
            found[item.name] = [leaf for v in item.value for leaf in v[DATA_RANK][-1:]]
    for item in checkpoint.manifest.objects:
        if item.name.startswith(f"{OWN}/"):
            group, keys, _, value = parts_of(item)
            found[group] = with_value(found.get(group), keys, value)
    return found


def _optimizer(documents: Any, filled: Callable[[Any, str], Any]) -> dict[str, Any]:
    """As torch's `get_optimizer_state_dict` has it: all optimizers together, by names."""
    where = f"objects.{OPTIMIZER}"
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    try:
        for document in documents:
            for group in document["groups"]:
                found["param_groups"].append({"params": group["params"], **group["options"]})
            for parameter, values in document["values"].items():
                found["state"][parameter] = filled(values, where)
    except (TypeError, KeyError, AttributeError) as error:
        raise FormatError("not what a save writes", where=where, value=documents) from error
    return found


def _path(name: str, wrapped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Where an array goes that no object refers to."""
    above, _, inner = name.rpartition("%2F")
    if above in wrapped:
        return (*_path(above, wrapped), unescape(inner))
    group, *nodes = split(name)
    if group == MODEL:
        return (group, "/".join(nodes))
    return (group, *(["state"] if group == OPTIMIZER else []), *nodes)


def _put(found: dict[str, Any], path: tuple[str, ...], tensor: torch.Tensor) -> None:
    for node in path[:-1]:
        found = found.setdefault(node, {})
        if not isinstance(found, dict):
            raise FormatError("an array at the place of a value", where="/".join(path))
    found[path[-1]] = tensor


def _has_some(name: str, tree: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether some of an object's tensors are chosen."""
    if name == OPTIMIZER:
        return any(each.startswith(f"{OPTIMIZER}/") for each in tensors)
    return any(each in tensors for each in arrays_in(tree, name))


def _is_wrapper(name: str) -> bool:
    return name.startswith(f"{WRAPPED}/")


def _parts(name: str, record: Any) -> list[str]:
    found = record.get("inner") if isinstance(record, dict) else None
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        raise FormatError("not what a save writes", where=f"objects.{name}", value=record)
    return found


def _without_gone(tree: Any) -> Any:
    """A tree without the tensors that were not chosen."""
    if type(tree) is dict:  # a Counter has no tensors, and stays one
        return {key: _without_gone(value) for key, value in tree.items() if value is not _GONE}
    if type(tree) in (list, tuple):
        return type(tree)(_without_gone(value) for value in tree if value is not _GONE)
    return tree


def _inner(name: str) -> str:
    return inner_name(name, OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else "")


def _takes(patterns: tuple[str, ...], name: str) -> bool:
    group = name.split("/", maxsplit=1)[0]
    return matches(patterns, name, name) or matches(patterns, group, group)
