"""Experts (MoE), which ranks have shared out among them: a file for each, by its number in the
whole layer, though its rank counts from 0.

DeepSpeed's own layers have a parameter for each expert. Of those that AutoEP makes out of other
models one parameter is all experts of a rank; here it is those of all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.files import (
    MIXED,
    NOT_COPIED,
    ModelPart,
    as_dict,
    read_tree,
    same_on_all,
)
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box, Owner, Placement, Shard, document

_NUMBERED = re.compile(
    r"(?P<layer>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<expert>\d{1,9})(?P<inner>\..+)"
)
# Of AutoEP, in a file of one expert.
_SLICE = re.compile(r"(?P<layer>(?:.*\.)?experts\.w[123])\.(?P<expert>\d{1,9})(?P<inner>)")
# So DeepSpeed names a group of experts, by how many ranks have all of them.
_OF_RANKS = re.compile(r"ep_size_(\d{1,9})")


@dataclass(slots=True)
class SharedExperts:
    """The experts of a model."""

    counts: dict[str, int] = field(default_factory=dict)
    """How many there are, by what the names of a layer's begin with, or by the name of the
    parameter that is all of them.
    """
    paths: list[str] = field(default_factory=list)
    """What the names of each layer of AutoEP begin with."""
    is_data_first: bool = False
    """Whether ranks with the same experts are neighbours; mostly those with all experts are."""
    degrees: set[int] = field(default_factory=set)
    """Over how many ranks those of a layer are shared out; filled as parameters are named."""

    def teams(self, count: int, world: int) -> list[range]:
        """The ranks that have the same experts, by which these are, where `count` have."""
        others = world // count
        if self.is_data_first:
            return [range(n * count, (n + 1) * count) for n in range(others)]
        return [range(n, world, others) for n in range(others)]

    def named(self, name: str, team: int, teams: int, where: str) -> str:
        """What a parameter of the ranks of a team is called in the whole model."""
        if teams == 1:
            return name
        match = _NUMBERED.fullmatch(name)
        count = self.counts.get(match["layer"] if match else name, 0)
        if not count or count % teams:
            raise FormatError(
                f"each {teams} ranks have a {name} of their own, which is none of {count} experts",
                where=where,
                hint="files of other ranks are missing or too many; shards in groups of ranks "
                "(MiCS) are not read here",
            )
        self.degrees.add(teams)
        if match is None:
            return name
        each, number = count // teams, int(match["expert"])
        if number >= each:
            raise FormatError(f"a rank has {each} experts", where=where, value=name, hint=MIXED)
        return f"{match['layer']}{team * each + number}{match['inner']}"

    def alike(self, name: str) -> list[str]:
        """The names of something in all experts of a layer, which are copies of one module."""
        if (match := _NUMBERED.fullmatch(name)) is None:
            return [name]
        numbers = range(self.counts.get(match["layer"], 0))
        return [f"{match['layer']}{n}{match['inner']}" for n in numbers] or [name]

    def routers(self, model: Mapping[str, StateTensor]) -> dict[str, str]:
        """The second names that routers of AutoEP may have, of the module that they stand for."""
        found = {}
        for path in self.paths:
            for name in (name for name in model if name.startswith(path)):
                of = f"{path}router.{name.removeprefix(path).partition('.')[2]}"
                router, mine = model.get(of), model[name]
                if router and (router.shape, router.content) == (mine.shape, mine.content):
                    found[name] = of
        return found

    def placement(self, name: str, teams: int) -> Placement | None:
        """Which of so many teams has an array, or how they cut it; None of what is no expert."""
        match = _NUMBERED.fullmatch(name)
        count = self.counts.get(match["layer"] if match else name, 0)
        if not count or count % teams:
            return None
        return Owner(int(match["expert"]) // (count // teams)) if match else Shard(0)


def read_experts(
    folder: Folder, parts: Sequence[ModelPart], *, is_universal: bool
) -> SharedExperts:
    """What the files of experts have, none of which is missing; stages of a pipeline have layers of
    their own.
    """
    config = as_dict(parts[0].tree.get("ds_config"))
    found = SharedExperts(is_data_first=bool(config.get("use_data_before_expert_parallelism")))
    for rank, part in enumerate(parts):
        said = part.tree.get("num_experts")
        counts = document.integers([] if said is None else said, f"{part.where}: num_experts")
        told = _told(part)
        found.paths += told
        if part.stage == 3 or is_universal:  # what there is of experts lies with the rest
            kinds = ("w1", "w2", "w3")
            found.counts |= {f"{path}experts.{it}": n for path, n in told.items() for it in kinds}
            counts = ()
        files = {} if is_universal else part.files.experts
        for layer in sorted({*files, *range(len(counts))}):
            there = files.get(layer, {})
            count = counts[layer] if layer < len(counts) else 0
            missing = next((n for n in range(count) if n not in there), None)
            if missing is not None:
                name = f"layer_{layer}_expert_{missing}_mp_rank_{rank:02d}_model_states.pt"
                raise FormatError(
                    "the file of an expert is missing",
                    where=f"{part.where.rpartition('/')[0]}/{name}",
                    hint=NOT_COPIED,
                )
            if len(there) > count:
                raise FormatError(
                    f"the layer has {count} experts",
                    where=folder.where(there[max(there)]),
                    hint="the files are of different saves: remove those that are too many",
                )
            part.experts |= _read_layer(folder, [there[number] for number in range(count)], found)
    return found


def _read_layer(
    folder: Folder, files: Sequence[str], found: SharedExperts
) -> dict[str, StateTensor]:
    """The tensors of the experts of a layer, by number; how many there are is added."""
    tensors: dict[str, StateTensor] = {}
    slices: dict[str, list[StateTensor]] = {}
    first: set[tuple[str, str]] = set()
    for number, key in enumerate(files):
        names: set[tuple[str, str]] = set()
        for name, value in read_tree(folder, key).items():
            match = _NUMBERED.fullmatch(str(name)) or _SLICE.fullmatch(str(name))
            if not isinstance(value, StateTensor) or match is None:
                raise FormatError(
                    "not a tensor of an expert", where=folder.where(key), value=str(name)[:200]
                )
            if match["expert"] != str(number):
                raise FormatError(
                    f"by its name the file is of expert {number}, it has {name}",
                    where=folder.where(key),
                    hint="the files have each other's names: copy the folder again",
                )
            names.add((match["layer"], match["inner"]))
            if match["inner"]:
                tensors[name] = value
            else:
                slices.setdefault(match["layer"], []).append(value)
        first = first or names
        if names != first:
            raise FormatError(
                "it has not the parameters of expert 0", where=folder.where(key), hint=MIXED
            )
    for layer in {layer for layer, _ in first}:
        if layer in found.counts:
            raise FormatError(
                "these experts are those of another layer",
                where=folder.where(files[0]),
                value=layer,
                hint="the files have each other's names: copy the folder again",
            )
        found.counts[layer] = len(files)
    for name, each in slices.items():
        shape = (len(each), *each[0].shape)
        tensors[name] = _stacked(name, shape, each, folder.where(files[0]))
    return tensors


def _stacked(
    name: str, shape: tuple[int, ...], parts: Sequence[StateTensor], where: str
) -> StateTensor:
    """A tensor of those of several experts, which lie one after the other in it."""
    first = parts[0]
    size = math.prod(first.shape)
    extents = []
    for number, each in enumerate(parts):
        is_row = len(each.extents) == 1 and each.extents[0].strides is None
        if (each.shape, each.dtype) != (first.shape, first.dtype) or not is_row:
            raise FormatError(
                f"part {number} of {name} is not as the first", where=where, value=each.shape
            )
        extents.append(replace(each.extents[0], box=Box((number * size,), (size,))))
    return StateTensor(shape, first.dtype, tuple(extents), identity=object(), is_flat=True)


def _told(part: ModelPart) -> dict[str, int]:
    """How many experts the layers of AutoEP have, by what the names of each begin with."""
    said = part.tree.get("ds_autoep_layers")
    found = {}
    for each in said if isinstance(said, (list, tuple)) else ():
        fields = as_dict(each)
        path = document.text(fields.get("module_path"), f"{part.where}: ds_autoep_layers")
        count = document.integer(fields.get("num_experts"), f"{part.where}: {path}")
        found[f"{path}." if path else ""] = count
    return found


def read_optimizers(folder: Folder, rank: int, part: ModelPart) -> list[dict[str, Any]]:
    """What the optimizers say, of all ranks that have all experts of a part of the model among
    them; without ZeRO.
    """
    files = part.files.expert_optimizers
    found: list[dict[str, Any]] = []
    ranks = int(bool(part.experts and part.tree.get("optimizer")))
    for key in (files[number] for number in range(len(files))):
        said = read_tree(folder, key).get("optimizer")
        if not isinstance(said, dict):
            raise FormatError("no optimizer is in the file", where=folder.where(key))
        found.append(said)
        groups = as_dict(said.get("optimizer_state_dict", said)).get("param_groups")
        groups = groups if isinstance(groups, list) else []
        names = [as_dict(each).get("name") for each in groups]
        told = [int(match[1]) for it in names if (match := _OF_RANKS.fullmatch(str(it)))]
        ranks = max(ranks, *told, 0)
    if len(files) < ranks:
        name = f"expp_rank_{len(files)}_mp_rank_{rank:02d}_optim_states.pt"
        raise FormatError(
            f"the optimizers of {ranks} ranks belong together, that of one is missing",
            where=f"{part.where.rpartition('/')[0]}/{name}",
            hint=NOT_COPIED,
        )
    return found


def by_order(
    optimizers: Sequence[Mapping[str, Any]],
    model: Mapping[str, StateTensor],
    experts: SharedExperts,
    where: str,
) -> dict[str, Any] | None:
    """One optimizer of those of all ranks, whose parameters are those of the model in order, and
    then the experts of the rank; None where they are not as many, or of other shapes.
    """
    ranks = len(optimizers)
    owners = {name: experts.placement(name, ranks) for name in model}
    common = [name for name, owner in owners.items() if owner is None]
    # AutoEP has put its routers behind what there was.
    common.sort(key=lambda name: any(name.startswith(f"{it}router.") for it in experts.paths))
    groups: list[dict[str, Any]] = []
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for rank, said in enumerate(optimizers):
        own = [name for name, owner in owners.items() if owner in (Owner(rank), Shard(0))]
        named = _named_groups(said, len(common), [*common, *own])
        if named is None:
            return None
        groups = groups or [{**group, "params": {}} for group, _ in named]
        if [_options(group) for group, _ in named] != [_options(group) for group in groups]:
            raise FormatError(
                f"the options of the optimizer of rank {rank} are not those of rank 0",
                where=where,
                hint=MIXED,
            )
        for group, (_, states) in zip(groups, named, strict=True):
            group["params"] |= dict.fromkeys(states)
            for name, state in states.items():
                by_name.setdefault(name, []).append(state)
    found: dict[str, dict[str, Any]] = {}
    for name, owned in by_name.items():
        shape = model[name].shape
        part = shape
        if owners[name] == Shard(0):
            part = (shape[0] // ranks, *shape[1:])
        for key in owned[0]:
            values = [state.get(key) for state in owned]
            tensors = [value for value in values if isinstance(value, StateTensor)]
            kinds = {value.shape for value in tensors}
            if not kinds <= {part, ()}:
                return None
            found.setdefault(name, {})[key] = (
                _stacked(f"{name}/{key}", shape, tensors, where)
                if kinds == {part} and part != shape and len(tensors) == ranks
                else same_on_all(f"{name}/{key}", values, where)
            )
    groups = [{**group, "params": [*group["params"]]} for group in groups]
    return {"state": found, "param_groups": groups}


def _named_groups(
    said: Mapping[str, Any], common: int, names: Sequence[str]
) -> list[tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]] | None:
    """The groups of an optimizer, with the states of their parameters by name; None where the
    first group has not so many that all ranks have, and the others no experts of one kind.
    """
    states, groups = (as_dict(said).get(key) for key in ("state", "param_groups"))
    if not isinstance(states, dict) or not isinstance(groups, list):
        return None
    numbers = [as_dict(group).get("params") for group in groups]
    lists = [each for each in numbers if isinstance(each, list)]
    if len(lists) < max(2, len(groups)) or len({repr(g.get("name")) for g in groups[1:]}) > 1:
        return None
    if len(lists[0]) != common or sum(map(len, lists)) != len(names):
        return None
    found: list[tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]] = []
    rest = iter(names)
    for group, each in zip(groups, lists, strict=True):
        mine = [as_dict(states.get(n) if type(n) is int else None) for n in each]
        found.append((group, dict(zip(islice(rest, len(each)), mine, strict=True))))
    return found


def _options(group: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != "params"})
