"""Nested dictionaries and lists: their tensors become arrays, all else stays one plain value.

Keys that only some ranks have, such as `dp_rank_3`, are objects of their own, which say whose they
are; their tensors are those of the first rank that has them.
"""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.format.encoding import canonical, dumps
from ckptkit.format.names import DATA_RANK, OWN, REFERENCE, escape
from ckptkit.format.objects import ObjectInfo, PerDataRank, PerRank, Replicated, Split, Sum
from ckptkit.live.state.parts import LiveTensor
from ckptkit.live.state.tensors import as_bits, check_plain, dtype_of, local_of, torch_dtype
from ckptkit.live.state.topology import Topology
from ckptkit.model import DType, Owner, Placement

_TENSOR = "ckptkit.tensor"
_MAX_DEPTH = 28


def _in_order(items: Iterable[object]) -> list[object]:
    """The items of a set, in one order on all ranks, whatever their hashes are."""
    return sorted(items, key=lambda item: canonical(_marked(item, "", None)))


# Values that the format has no type for are a map of one key, which says how they are made again
# (FORMAT section 8). A reader that does not know the key has a map with all that there is to know.
# By type: that key, how a value is taken apart, and how it is made again.
_MARKS: dict[type, tuple[str, Callable[[Any], object], Callable[[Any], object]]] = {
    # Some schedulers keep one, and ask it for what a dictionary does not have.
    Counter: ("ckptkit.counter", dict, lambda counts: Counter(dict(counts))),
    set: ("ckptkit.set", _in_order, set),
    frozenset: ("ckptkit.frozenset", _in_order, frozenset),
    deque: (
        "ckptkit.deque",
        lambda items: [list(items), items.maxlen],
        lambda given: deque(given[0], maxlen=given[1]),
    ),
    datetime.date: ("ckptkit.date", datetime.date.isoformat, datetime.date.fromisoformat),
    torch.Size: ("ckptkit.size", list, torch.Size),
}
_MADE_BY = {mark: made for mark, _, made in _MARKS.values()}


def take_tensors(
    tree: object, name: str, array_at: Callable[[str], str] = str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree with a mark for each tensor, and the tensors by their paths, which begin with
    `name`; the mark tells the name of the array, which is the path itself by default.
    """
    tensors: dict[str, torch.Tensor] = {}

    def reference(tensor: torch.Tensor, path: str) -> dict[str, str]:
        if path in tensors:
            raise UnsupportedTypeError("two keys are the same as text", where=path)
        tensors[path] = tensor
        return {REFERENCE: array_at(path)}

    return _marked(tree, name, reference), tensors


def tensors_inline(tree: Any, where: str = "") -> Any:
    """The tree with the values of its tensors in it, for small ones that each rank has its own
    of.
    """

    def values(tensor: torch.Tensor, path: str) -> dict[str, Any]:
        check_plain(path, tensor)
        bits = as_bits(path, local_of(tensor).cpu().contiguous())
        return {_TENSOR: bits.view(dtype_of(path, tensor).numpy)}

    return _marked(tree, where, values)


def plain_extra(name: str, value: object) -> object:
    """A value of `extra` with marks, whatever it says of ranks. Of dictionaries and lists only the
    plain ones are taken: a load would not give back another kind, so it is refused when stored.
    """
    if isinstance(value, Sum):
        return value
    if isinstance(value, (PerDataRank, PerRank, Replicated, Split)):
        return type(value)(_marked(value.value, name, None))
    return _marked(value, name, None)


def _marked(
    tree: Any,
    path: str,
    tensor_as: Callable[[torch.Tensor, str], Any] | None,
    depth: int = 0,
) -> Any:
    """The tree with marks where it has what the format has no type for; `tensor_as` says what
    stands for a tensor.
    """
    if depth > _MAX_DEPTH:
        if tensor_as is None:
            return tree  # as deep as the format allows, but without marks
        raise UnsupportedTypeError(
            f"more than {_MAX_DEPTH} levels deep (or it contains itself)", where=path
        )
    if tensor_as is not None and isinstance(tree, torch.Tensor):
        return tensor_as(tree, path)
    if form := _MARKS.get(Counter if isinstance(tree, Counter) else type(tree)):
        mark, apart, _ = form
        return {mark: _marked(apart(tree), path, tensor_as, depth + 1)}
    is_any = tensor_as is not None
    if isinstance(tree, Mapping) if is_any else type(tree) in (dict, OrderedDict):
        for mark in (REFERENCE, DATA_RANK, _TENSOR, *_MADE_BY):
            if mark in tree:
                raise UnsupportedTypeError("the key is ckptkit's own", where=path, value=mark)
        return {
            key: _marked(value, f"{path}/{escape(str(key))}", tensor_as, depth + 1)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)) if is_any else type(tree) in (list, tuple):
        items = [_marked(v, f"{path}/{at}", tensor_as, depth + 1) for at, v in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def put_tensors(tree: Any, tensor_of: Callable[[str], torch.Tensor] | None, where: str) -> Any:
    """The tree that `take_tensors` took apart, with a tensor at each mark; without `tensor_of` the
    value that `plain_extra` was given, which has no tensors.
    """
    if isinstance(tree, dict):
        if tensor_of is not None and REFERENCE in tree:
            if len(tree) != 1 or not isinstance(tree[REFERENCE], str):
                raise FormatError("not the mark of an array", where=where, value=tree)
            return tensor_of(tree[REFERENCE])
        if tensor_of is not None and _TENSOR in tree:
            array = tree[_TENSOR]
            if len(tree) != 1 or not isinstance(array, np.ndarray):
                raise FormatError("not the values of a tensor", where=where, value=tree)
            dtype = DType.of(array.dtype)
            tensor = torch.empty(array.shape, dtype=torch_dtype(dtype), device="cpu")
            as_bits(where, tensor)[...] = array.view(dtype.bits)
            return tensor
        if len(tree) == 1 and (mark := next(iter(tree))) in _MADE_BY:
            given = put_tensors(tree[mark], tensor_of, where)
            try:
                return _MADE_BY[mark](given)
            except (TypeError, ValueError, LookupError) as error:
                raise FormatError(f"no value for {mark}", where=where, value=given) from error
        return {key: put_tensors(value, tensor_of, where) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [put_tensors(value, tensor_of, where) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def no_tensor(name: str) -> torch.Tensor:
    """Refuse the mark of a tensor where there can be none."""
    raise FormatError("not a value without tensors", where=name)


def value_at(tree: Any, keys: Sequence[Any]) -> Any:
    """What lies in nested dictionaries under some keys, one inside of the other; else None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def with_value(tree: Any, keys: Sequence[Any], value: Any) -> Any:
    """Nested dictionaries with one more value; those that are given stay as they are."""
    if not keys:
        return value
    known = tree if isinstance(tree, dict) else {}
    return known | {keys[0]: with_value(known.get(keys[0]), keys[1:], value)}


def without_key(tree: Any, keys: Sequence[Any]) -> Any:
    """Nested dictionaries without one value that they have."""
    if len(keys) == 1:
        return {key: value for key, value in tree.items() if key != keys[0]}
    return tree | {keys[0]: without_key(tree[keys[0]], keys[1:])}


def arrays_in(tree: Any, where: str) -> list[str]:
    """The names of the arrays that a tree marks."""
    found: list[str] = []

    def note(name: str) -> torch.Tensor:
        found.append(name)
        return torch.empty(0, device="cpu")

    put_tensors(tree, note, where)
    return found


def differences(mine: Any, theirs: Any, where: str) -> Iterator[tuple[str, str]]:
    """How a taken tree differs from what `replace_leaves` is to give it, as a report says it: the
    way, and what. Tensors with values in the trees are compared; those of arrays are elsewhere.
    """
    if _is_mark(mine) or _is_mark(theirs):
        pair = (it.get(_TENSOR) if isinstance(it, dict) else None for it in (theirs, mine))
        there, here = pair
        if isinstance(there, np.ndarray) and isinstance(here, np.ndarray):
            if there.shape != here.shape:
                yield "reshaped", f"{where}: {there.shape} in the step, {here.shape} here"
            elif there.dtype != here.dtype:
                dtypes = DType.of(there.dtype), DType.of(here.dtype)
                yield "cast", f"{where}: {dtypes[0]} in the step, {dtypes[1]} here"
        return
    items: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(mine, dict) and isinstance(theirs, dict):
        items = [(key, value, theirs[key]) for key, value in mine.items() if key in theirs]
        for key, value in mine.items():
            # Arrays that the step lacks are noted by who looks for them, by their own names.
            if key not in theirs and not arrays_in(value, where):
                yield "missing", f"{where}/{escape(str(key))}"
    elif isinstance(mine, (list, tuple)) and type(mine) is type(theirs):
        items = zip(range(len(mine)), mine, theirs, strict=False)
    for key, value, given in items:
        yield from differences(value, given, f"{where}/{escape(str(key))}")


@torch.no_grad()
def replace_leaves(target: Any, source: Any) -> Any:
    """Give a tree of dictionaries, lists and tuples the values of another, in place; what stands
    for it then, which is another one only of a tuple or a plain value. Tensors that the target has
    stay, with the values of those that are in their places; they may be these themselves, filled
    already. One of another shape is left as it is.
    """
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        local = local_of(target)
        if target is not source and local.shape == source.shape:
            local.copy_(source)
        return target
    found: Any = target
    items: list[tuple[Any, Any, Any]]  # each with the value that the target has there
    if isinstance(target, dict) and isinstance(source, dict):
        items = [(key, target.get(key), value) for key, value in source.items()]
    elif type(source) in (list, tuple) and isinstance(target, type(source)):
        found = list(target) if isinstance(target, tuple) else target
        found[len(source) :] = []
        found += [None] * (len(source) - len(found))
        items = [(at, found[at], value) for at, value in enumerate(source)]
    else:
        return source
    for key, mine, value in items:
        is_tree = isinstance(mine, (torch.Tensor, dict, list, tuple))
        given = replace_leaves(mine, value) if is_tree else value
        if given is not mine:
            found[key] = given
    return tuple(found) if isinstance(target, tuple) else found


Keys: TypeAlias = tuple[str | int, ...]
"""The group and the keys that lead to a value of a nested dictionary."""


def keys_digest(trees: Mapping[str, Any]) -> bytes:
    """The same for the same keys, in whatever order they are; empty without nested dictionaries."""
    ordered = sorted((list(keys) for keys in _keys(trees)), key=dumps)
    return hashlib.sha256(dumps(ordered)).digest() if trees else b""


def keys_of_some(ranks: Ranks, trees: Mapping[str, Any], *, differs: bool) -> dict[Keys, list[int]]:
    """What only some ranks have in their nested dictionaries, the outermost keys, with the ranks
    that have them. `differs` says whether this rank has other keys than rank 0.
    """
    if not ranks.agree(differs, any):
        return {}

    def of_some(heard: list[list[Keys]]) -> list[tuple[Keys, list[int]]]:
        holders: dict[Keys, list[int]] = {}
        for rank, said in enumerate(heard):
            for keys in said:
                holders.setdefault(keys, []).append(rank)
        some = {keys: those for keys, those in holders.items() if len(those) < ranks.world_size}
        return [(keys, those) for keys, those in some.items() if keys[:-1] not in some]

    return dict(ranks.agree(list(_keys(trees)), of_some))


def _keys(tree: object, above: Keys = ()) -> Iterator[Keys]:
    """All keys of a taken tree but those of marks, which stand for one value."""
    if isinstance(tree, dict) and not _is_mark(tree):
        for key, value in tree.items():
            yield (*above, key)
            yield from _keys(value, (*above, key))


def _is_mark(tree: object) -> bool:
    """Whether it stands for one value, a tensor or what the format has no type for."""
    marks = (REFERENCE, _TENSOR, *_MADE_BY)
    return isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)) in marks


def own_apart(
    topology: Topology,
    objects: Mapping[str, object],
    tensors: Sequence[LiveTensor],
    some: Mapping[Keys, list[int]],
) -> tuple[dict[str, object], list[LiveTensor]]:
    """The objects and tensors to save, where some ranks have keys that others have not."""
    found = dict(objects)
    owners: dict[str, dict[str, Placement]] = {}
    mesh = topology.strategy.mesh
    for path, ranks in some.items():
        if topology.rank not in ranks:
            continue
        value, found = value_at(found, path), without_key(found, path)
        name = "/".join([OWN, *(escape(str(key) or "_") for key in path)])
        found[name] = {"group": path[0], "keys": list(path[1:]), "ranks": ranks, "value": value}
        coords = zip(mesh.axes, mesh.coords(ranks[0]), strict=True)
        owner: dict[str, Placement] = {a.name: Owner(at) for a, at in coords if a.size > 1}
        owners |= dict.fromkeys(arrays_in(value, name), owner)
    # What is cut over the ranks that have it says so itself.
    mine = [
        held._replace(placements=owners[held.name] | dict(held.placements), alike_along=frozenset())
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
        if was_mine or value_at(here, [group, *keys]) is not None:
            known = found[group].value if group in found else None
            found[group] = ObjectInfo(group, "replicated", with_value(known, keys, value))
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
