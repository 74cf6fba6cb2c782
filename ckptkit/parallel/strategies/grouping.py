"""Which modules `fully_shard` gathers together: many tiny ones in one go, large ones alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ckptkit.live.state.tensors import local_of

# Their `forward` need not exist, or need not be called by whoever iterates over them.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Not all of them run in each step, so that they can only be gathered with what contains them.
_EXPERTS = re.compile(r"experts?")


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Modules whose parameters are gathered by one collective."""

    names: tuple[str, ...]
    """Of the layers in it, in the model or in a stage of it."""
    modules: tuple[nn.Module, ...]
    nbytes: int
    """Of their parameters on this rank, before they were cut."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    whole: int
    below: int


@dataclass(frozen=True, slots=True, eq=False)
class _Atom:
    name: str
    module: nn.Module
    nbytes: int


def units_of(model: nn.Module, below: int) -> list[Unit]:
    """The units of a model in the order of its modules; what is in none belongs to the model's own.

    Elements of containers are gathered whole, and so are modules without containers, unless they
    hold more than half of the model. Those smaller than `below` bytes make up units of about that
    size, and if only those just before the last one are left they go with it, where they are
    trained in the same dtype; modules that share parameters with others stay out.
    """
    whole = nbytes_of(model.parameters())
    if whole <= below:
        return []
    atoms = list(_children("", model, _Sizes(whole, below)))
    inside = {id(m) for atom in atoms for m in atom.module.modules()}
    others = (m for m in model.modules() if id(m) not in inside)
    users = Counter(id(p) for m in others for p in m.parameters(recurse=False))
    for atom in atoms:
        users.update({id(p) for p in atom.module.parameters()})
    # One that stands at two places shares them with itself, and runs more than once in a step.
    alone = [a for a in atoms if all(users[id(p)] == 1 for p in a.module.parameters())]
    return list(_packed(alone, below))


def own_unit(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """What is in no unit, and is gathered with the model itself; nothing where all is in one."""
    inside = {id(p) for unit in units for m in unit.modules for p in m.parameters()}
    rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    layers = dict.fromkeys(name.rpartition(".")[0] for name in rest)
    return [Unit(tuple(layers), (model,), nbytes_of(rest.values()))] if rest else []


def nbytes_of(parameters: Iterable[torch.Tensor]) -> int:
    """What distinct tensors occupy on this rank."""
    distinct = {id(p): p for p in parameters}
    return sum(local_of(p).numel() * p.element_size() for p in distinct.values())


def _children(prefix: str, module: nn.Module, sizes: _Sizes) -> Iterator[_Atom]:
    is_container = isinstance(module, CONTAINERS)
    # Not by named_children, which names a module once that stands at two places.
    for name, child in module._modules.items():
        nbytes = nbytes_of(child.parameters()) if child is not None else 0
        if child is None or not nbytes:
            continue
        path = f"{prefix}{name}"
        if _is_taken_apart(child, nbytes, sizes, is_element=is_container):
            yield from _children(f"{path}.", child, sizes)
        else:
            yield _Atom(path, child, nbytes)


def _is_taken_apart(module: nn.Module, nbytes: int, sizes: _Sizes, *, is_element: bool) -> bool:
    """Whether to gather what is inside of a module rather than all of it."""
    if isinstance(module, CONTAINERS):
        return True
    names = (node for name, _ in module.named_modules() for node in name.split("."))
    if nbytes < sizes.below or any(_EXPERTS.fullmatch(node) for node in names):
        return False
    has_containers = any(isinstance(child, CONTAINERS) for child in module.modules())
    if type(module).__module__.startswith("torch.nn.") and not has_containers:
        return False  # such as MultiheadAttention, which uses parameters of what it does not call
    is_most = 2 * nbytes > sizes.whole
    return (is_most or (has_containers and not is_element)) and any(
        True for child in module.children() for _ in child.parameters()
    )


def _packed(atoms: Sequence[_Atom], below: int) -> Iterator[Unit]:
    run: list[_Atom] = []
    is_parted = False
    for atom in atoms:
        # What is left before the last one goes with it, as a norm with the head after it.
        is_last = atom is atoms[-1] and not is_parted and len(_trained_in([*run, atom])) < 2
        if atom.nbytes >= below and not is_last:
            yield _unit([atom])
            is_parted = bool(run)
            continue
        run.append(atom)
        if sum(each.nbytes for each in run) >= below:
            yield _unit(run)
            run, is_parted = [], False
    # What is left is less than that, and comes with the model's own unit.


def _trained_in(atoms: Iterable[_Atom]) -> set[torch.dtype]:
    trained = (p for atom in atoms for p in atom.module.parameters() if p.requires_grad)
    return {parameter.dtype for parameter in trained}


def _unit(atoms: Sequence[_Atom]) -> Unit:
    return Unit(
        tuple(atom.name for atom in atoms),
        tuple(atom.module for atom in atoms),
        sum(atom.nbytes for atom in atoms),
    )
