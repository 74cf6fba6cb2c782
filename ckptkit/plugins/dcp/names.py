"""What DCP calls a value and what a step does: `model.layers.0.weight` is `model/layers.0.weight`,
`optim.state.layers.0.weight.exp_avg` is `optimizer/layers.0.weight/exp_avg`, as where DCP's own
folders are read. How the keys were spelled goes with the step, so that they are given back.

And which step a call of DCP means, and how its ranks meet.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.errors import FormatError, UsageError
from ckptkit.foreign.extents import ForeignArray
from ckptkit.foreign.readers.dcp import with_lists
from ckptkit.foreign.states import MODEL_KEYS, OPTIMIZER_KEYS, Path, StateTensor, put, states_of
from ckptkit.format.encoding import encode
from ckptkit.format.names import MODEL, OPTIMIZER, join, split
from ckptkit.live.state.ranks import StoreRanks, World, current_world, ranks_of
from ckptkit.live.state.trees import no_tensor, put_tensors, tensors_inline
from ckptkit.model.document import Fields
from ckptkit.storage import Options, Store

# The mark of what was a file in memory, as the state of some loops has: its bytes.
_FILE = "ckptkit.dcp.file"

OBJECT = "dcp"
"""The object of a step that says how its keys are spelled, and has the values of DCP's own."""

_NODE = r"step[-_]?(?P<step>[0-9]{1,19})/*"
_STEP = re.compile(rf"(?:(?P<run>.*?)/)?{_NODE}", re.ASCII | re.DOTALL)
_FORMER = re.compile(rf"(?P<run>.*?[^/]){_NODE}", re.ASCII | re.DOTALL)
_OPTIMIZERS = re.compile(rf"{'|'.join(OPTIMIZER_KEYS)}|optimizer_[0-9]+", re.ASCII)
_NUMBERED = re.compile(r"state\.[0-9]+\..*", re.ASCII)


_Told = TypeVar("_Told")


@dataclass(eq=False, slots=True)
class Target:
    """A run, and perhaps a step of it; `checkpoint_id` of a call may name another."""

    location: Place
    step: int | None
    options: Options | None

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.store().location}{step}"

    def name(self, checkpoint_id: str | os.PathLike[str] | int) -> None:
        """Take the `checkpoint_id` of a call: the number of a step, or the path of a run or of a
        step in it.
        """
        text = str(checkpoint_id)
        if text.isdecimal():
            self.step = int(text)
        elif step := _STEP.fullmatch(text):
            self.location, self.step = step["run"] or ".", int(step["step"])
        else:
            self.location = text

    def former(self) -> tuple[Store, int] | None:
        """Where a path such as `runs/global_step7` was saved once: as step 7 of `runs/global_`."""
        found = None if self.step is not None else _FORMER.fullmatch(str(self.location))
        return None if found is None else (store_at(found["run"], self.options), int(found["step"]))

    def store(self) -> Store:
        """The store of the run."""
        return store_at(self.location, self.options)


class Meeting(NamedTuple):
    """How the ranks of one call meet: over the store of the job, under a name that no other call
    has. The coordinator puts it into the plan of each, so any process group does, in any thread.
    """

    name: str
    size: int
    """How many ranks come."""

    @classmethod
    def of(cls, size: int) -> Meeting:
        """A new one."""
        return cls(f"dcp/{secrets.token_hex(12)}", size)

    def ranks(self, rank: int, timeout: float, failure: str) -> StoreRanks | OneRank:
        """The ranks, as one of them meets the others."""
        world = World(rank, self.size, current_world().rendezvous)
        return ranks_of(world, self.name, timeout, failure)


def told_by(plan: Any, kind: type[_Told], planner: object, where: str) -> _Told:
    """What the coordinator tells a rank, in the plan that DCP and its planner have handed on."""
    if isinstance(plan.storage_data, kind):
        return plan.storage_data
    raise UsageError(
        "the planner has dropped what the coordinator tells the ranks",
        where=where,
        value=type(planner).__name__,
        hint="create plans by dataclasses.replace(plan, items=…), which keeps storage_data",
    )


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a group is spelled: the keys that lead to it, and what its names begin with, as those of
    a wrapped model do. State of an optimizer may be flat: one key for `state.<parameter>.<key>`.
    """

    above: Path
    inside: str = ""
    is_flat: bool = False

    def path(self, nodes: tuple[str, ...]) -> Path:
        """Where a value is: of a parameter's name, or of that and a key of an optimizer's."""
        first, *rest = nodes
        if self.is_flat:
            return (*self.above, ".".join(["state", self.inside + first, *rest]))
        return (*self.above, self.inside + first, *rest)


@dataclass(frozen=True, slots=True)
class Names:
    """How the keys of a state dictionary are spelled, by the names of the arrays of a step."""

    around: Path = ()
    """The key of the one dictionary that has the model and the optimizer, where there is one."""
    apart: frozenset[str] = frozenset()
    """What looks like optimizers, but only counts parameters: nobody can name these."""
    groups: Mapping[str, Spelling] = field(default_factory=dict)
    others: Mapping[str, Path] = field(default_factory=dict)
    """The keys that lead to each array that is spelled otherwise."""

    def path(self, name: str) -> Path:
        """The keys that lead to an array."""
        if name in self.others:
            return self.others[name]
        group, *nodes = split(name)
        if group not in self.groups or len(nodes) != (2 if group == OPTIMIZER else 1):
            raise FormatError("it does not say which key this was", where=OBJECT, value=name)
        return self.groups[group].path(tuple(nodes))

    def to_doc(self) -> dict[str, Any]:
        """As plain values."""
        groups = {k: [list(s.above), s.inside, s.is_flat] for k, s in self.groups.items()}
        others = {name: list(path) for name, path in self.others.items()}
        apart = sorted(self.apart)
        return {"around": list(self.around), "apart": apart, "groups": groups, "others": others}

    @classmethod
    def from_doc(cls, doc: Any, where: str) -> Names:
        """What `to_doc` gave; a FormatError where it is not."""
        fields = Fields(doc, where)
        groups: dict[str, Spelling] = {}
        for group, said in _map(fields.any("groups"), where).items():
            if not isinstance(said, list) or [type(s) for s in said[1:]] != [str, bool]:
                raise FormatError("not how keys are spelled", where=where, value=said)
            groups[group] = Spelling(path_of(said[0], where), said[1], said[2])
        others = _map(fields.any("others"), where)
        return cls(
            path_of(fields.any("around"), where),
            frozenset(str(key) for key in path_of(fields.any("apart"), where)),
            groups,
            {name: path_of(path, where) for name, path in others.items()},
        )

    def inner(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """What of a nested dictionary is sorted out, by the keys that it has there."""
        taken = dict(tree)
        for key in self.around:
            taken = {k: v for k, v in taken.items() if k != key} | taken.get(key, {})
        return {key: value for key, value in taken.items() if key not in self.apart}

    def short(self, path: Path) -> Path:
        """The keys that lead to a value there."""
        around = len(self.around)
        return path[around:] if path[:around] == self.around else path


def name_tensors(
    tensors: Mapping[str, StateTensor], paths: Mapping[str, Path], where: str
) -> tuple[dict[str, ForeignArray], Names]:
    """The array that each tensor of a state dictionary is, by DCP's names; and how these are
    spelled. `paths` are the keys that lead to them, and to all else.
    """
    tree: dict[Any, Any] = {}
    for fqn, path in paths.items():
        put(tree, path, tensors.get(fqn), fqn)
    names = Names(_around(tree))
    apart = {key for key, value in names.inner(tree).items() if _only_counts(key, value)}
    names = replace(names, apart=frozenset(apart))
    found = states_of(names.inner(tree), where)
    by_name = {array.name: array for array in found.arrays}
    spelled = {dotted: name for name, dotted in found.theirs.items()}
    arrays: dict[str, ForeignArray] = {}
    groups: dict[str, Spelling] = {}
    others: dict[str, Path] = {}
    for fqn, path in paths.items():
        if fqn not in tensors:
            continue
        short = names.short(path)
        name = spelled.get(".".join(map(str, short)))
        if name is None or short[0] in apart:
            tensor = tensors[fqn]
            name = join("other", *(str(node) or "_" for node in path))
            arrays[fqn] = ForeignArray(name, tensor.shape, tensor.dtype, tensor.extents, "other")
        else:
            arrays[fqn] = by_name[name]
        group, *nodes = split(name)
        if group not in groups and (spelling := _spelling(group, nodes, path)):
            groups[group] = spelling
        fits = len(nodes) == (2 if group == OPTIMIZER else 1)
        if not (fits and group in groups and groups[group].path(tuple(nodes)) == path):
            others[name] = path
    return arrays, replace(names, groups=groups, others=others)


def as_leaf(fqn: str, value: Any) -> Any:
    """A value that is no tensor as a step has it; what it has no type for is refused by its key."""
    if isinstance(value, io.BytesIO):
        return {_FILE: value.getvalue()}
    leaf = tensors_inline(value, fqn)
    encode(leaf, fqn)
    return leaf


def from_leaf(fqn: str, leaf: Any) -> Any:
    """The value that `as_leaf` was given."""
    if isinstance(leaf, dict) and leaf.keys() == {_FILE}:
        return io.BytesIO(leaf[_FILE])
    return put_tensors(leaf, no_tensor, fqn)


def objects_of(names: Names, values: Mapping[str, tuple[Path, Any]], where: str) -> dict[str, Any]:
    """What a step has besides tensors, of the values of a state dictionary by DCP's names: what a
    Checkpointer looks for, and the values as they were under their own keys.
    """
    tree: dict[Any, Any] = {}
    for fqn, (path, value) in values.items():
        put(tree, path, value, fqn)
    states = states_of(with_lists(names.inner(tree)), where)
    found = {name: item.value for name, item in states.objects.items()}
    kept: dict[str, Any] = {}
    for fqn, (path, value) in values.items():
        # Large ones are not stored twice.
        is_there = _value_at(found, names, path) is value
        kept[fqn] = [list(path)] if is_there else [list(path), value]
    return found | {OBJECT: {"names": names.to_doc(), "values": kept}}


def value_in(names: Names, objects: Mapping[str, Any], said: Any, where: str) -> tuple[Path, Any]:
    """The keys that lead to a value, and the value, as `objects_of` has kept it."""
    if not isinstance(said, list) or len(said) not in (1, 2):
        raise FormatError("not a value with its keys", where=where, value=said)
    path = path_of(said[0], where)
    if len(said) == 2:
        return path, said[1]
    found = _value_at(objects, names, path)
    if found is _NOWHERE:
        raise FormatError("the value is not where it says", where=where, value=path)
    return path, found


_NOWHERE: Any = object()


def _value_at(objects: Mapping[str, Any], names: Names, path: Path) -> Any:
    """The value with these keys, where among the objects it belongs to neither a model nor an
    optimizer.
    """
    if not (short := names.short(path)):
        return _NOWHERE
    tree: Any = objects
    for key in (f"extra/{short[0]}", *short[1:]):
        is_map = isinstance(tree, dict) and key in tree
        if not is_map and not (
            isinstance(tree, list) and type(key) is int and 0 <= key < len(tree)
        ):
            return _NOWHERE
        tree = tree[key]
    return tree


def _around(tree: Mapping[Any, Any]) -> Path:
    """The one key with a model in its dictionary, where there is none outside."""

    def has_model(value: Any) -> bool:
        models = [m for m in map(value.get, MODEL_KEYS) if isinstance(m, dict)]
        return any(isinstance(each, StateTensor) for m in models for each in m.values())

    if has_model(tree):
        return ()
    found = [key for key, value in tree.items() if isinstance(value, dict) and has_model(value)]
    if len(found) != 1 or (tree.keys() - {found[0]}) & tree[found[0]].keys():
        return ()
    return (found[0],)


def _only_counts(key: Any, value: Any) -> bool:
    """Whether this is an optimizer that has numbers for the names of its parameters."""
    if not isinstance(value, dict) or not _OPTIMIZERS.fullmatch(str(key)):
        return False
    state = value.get("state")
    if isinstance(state, dict):
        return any(str(index).isdecimal() for index in state)
    return any(_NUMBERED.fullmatch(str(inner)) for inner in value)


def _spelling(group: str, nodes: list[str], path: Path) -> Spelling | None:
    """How a group is spelled in which this array has these keys."""
    *above, last = path
    if group == MODEL and len(nodes) == 1 and str(last).endswith(nodes[0]):
        return Spelling(tuple(above), str(last).removesuffix(nodes[0]))
    if group != OPTIMIZER or len(nodes) != 2:
        return None
    parameter, key = nodes
    if last == key and above and str(above[-1]).endswith(parameter):
        return Spelling(tuple(above[:-1]), str(above[-1]).removesuffix(parameter))
    flat = str(last).removesuffix(f"{parameter}.{key}")
    if flat != last and flat.startswith("state."):
        return Spelling(tuple(above), flat.removeprefix("state."), is_flat=True)
    return None


def path_of(value: Any, where: str) -> Path:
    """A list of keys."""
    if not isinstance(value, list) or not all(type(key) in (str, int) for key in value):
        raise FormatError("not a list of keys", where=where, value=value)
    return tuple(value)


def _map(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise FormatError("not a map by names", where=where, value=value)
    return value
