"""What optimizers take over from a step: the state of the parameters that fit it, under the names
that these have here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import Band, Limits, stored_arrays, stream
from ckptkit.errors import FormatError
from ckptkit.format.leaves import dumps
from ckptkit.format.names import MODEL, OPTIMIZER, WRAPPED, join, split
from ckptkit.live.agreement import Documents
from ckptkit.live.state.parts import LiveTensor, Tied
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state.trees import arrays_in, put_tensors
from ckptkit.live.wrappers.entries import Saved, SavedState

_COMPARE_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that is taken over, and the optimizers' documents as if it had been saved here."""

    state: SavedState
    arrays: Mapping[str, str]
    """The name that the step has each tensor of an optimizer under."""
    documents: Documents

    def of_kind(self, kind: str) -> SavedState:
        """What optimizers of one kind kept, by parameter."""
        mine = trained_by(self.documents, kind)
        return {name: kept for name, kept in self.state.items() if name in mine}


class Twins:
    """Tied parameters: the names that each has, in the step or here."""

    def __init__(self, checkpoint: Checkpoint, tied: Iterable[Tied]) -> None:
        pairs = [(alias.name, alias.alias_of) for alias in checkpoint.manifest.aliases]
        pairs += [(each.name, each.of) for each in tied]
        self._sets: dict[str, set[str]] = {}
        for pair in pairs:
            names = [name.removeprefix("model/") for name in pair if name.startswith("model/")]
            joint = set(names).union(*(self._sets.get(name, ()) for name in names))
            self._sets |= dict.fromkeys(joint, joint)

    def of(self, parameter: str) -> list[str]:
        """All names of a parameter, its own first."""
        return [parameter, *sorted(self._sets.get(parameter, set()) - {parameter})]


def untied(checkpoint: Checkpoint, tied: Iterable[Tied], documents: Documents) -> list[list[str]]:
    """The pairs of arrays of the step, by name, of which a tensor here can be only one: those of
    tied names that were not, and what optimizers had for them.
    """
    aliases = {alias.name: alias.alias_of for alias in checkpoint.manifest.aliases}
    first: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for each in tied:
        for name in (each.of, each.name):
            own = aliases.get(name, name)
            if name in checkpoint and first.setdefault(each.of, own) != own:
                pairs[first[each.of], own] = None
    said, kept = _said(documents), _saved(checkpoint)
    for pair in list(pairs):
        a, b = (split(name)[1] for name in pair)
        if a in said and b in said:
            keys = kept.get(a, {}).keys() | kept.get(b, {}).keys()
            for key in sorted(keys):
                pairs[join("optimizer", a, key), join("optimizer", b, key)] = None
            if said[a] != said[b]:  # no arrays: their groups have other options
                pairs[join("optimizer", a), join("optimizer", b)] = None
    return [list(pair) for pair in pairs]


def differing(
    checkpoint: Checkpoint, pairs: Sequence[Sequence[str]], *, threads: int | None
) -> list[str]:
    """Of pairs of arrays those that are not the same to the bit, read in bounded memory."""
    limits = Limits.of(_COMPARE_MEMORY, threads, sides=2, stores=[checkpoint.store])
    apart: set[int] = set()

    def compare(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        if not np.array_equal(values[0], values[1]):
            apart.add(alike[band.item])

    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    found = [[stored.get(name) for name in pair] for pair in pairs]
    items = [[each for each in pair if each is not None] for pair in found]
    forms = [{(each.shape, each.dtype) for each in pair} for pair in items]
    alike = [at for at, p in enumerate(items) if len(p) == 2 and len(forms[at]) == 1]
    apart.update(set(range(len(pairs))).difference(alike))
    stream([items[at] for at in alike], compare, limits)
    return [
        f"{pairs[at][1]}: not what {pairs[at][0]} is in the step, and one tensor here"
        for at in sorted(apart)
    ]


def _said(documents: Documents) -> dict[str, bytes]:
    """What optimizers say of each parameter besides tensors."""
    found = {}
    for document in documents:
        for group in document["groups"]:
            for name in group["params"]:
                kept = document["values"].get(name, {})
                said = [sorted(each.items()) for each in (group["options"], kept)]
                found[name] = dumps([document["kind"], said])
    return found


def resume(
    checkpoint: Checkpoint, documents: Documents, fitting: Sequence[LiveTensor], twins: Twins
) -> Resumed:
    """What the step has for the parameters among tensors that fit it."""
    trained = trained_by(documents)
    saved, wrappers = _saved(checkpoint), _wrappers(checkpoint)
    theirs: dict[str, str] = {}
    state: dict[str, dict[str, Any]] = {}
    arrays: dict[str, str] = {}
    for held in fitting:
        _, name = split(held.name) if held.role == "param" else ("", "")
        there = next((each for each in twins.of(name) if each in trained), "")
        if not there:
            continue
        theirs[name] = there
        state[name] = {}
        for key, array in saved.get(there, {}).items():
            arrays[join("optimizer", name, key)] = array
            of = wrappers.get(there, {}).get("")
            state[name][key] = _as_here(checkpoint, array, join("model", there), of, held)
        for key, record in wrappers.get(there, {}).items():
            if key:
                parts = [each for each in state[name] if each.startswith(f"{key}/")]
                state[name] = {k: v for k, v in state[name].items() if k not in parts}
                state[name][key] = record
        for document in documents:
            state[name] = nested(state[name], document["values"].get(there, {}), there)
    return Resumed(state, arrays, [_renamed(document, theirs) for document in documents])


def nested(kept: Mapping[str, Any], values: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """What is kept for a parameter, by key: where an optimizer keeps a list or a dictionary of
    tensors, that container, with what is saved of each tensor at its place.
    """
    found = dict(kept)
    for key, tree in values.items():
        where = f"objects.optimizer: {parameter}, {key}"
        inside = dict.fromkeys(arrays_in(tree, where))

        def saved(array: str, where: str = where) -> Any:
            nodes = split(array)
            if nodes[:2] != ("optimizer", parameter) or nodes[2:3] == () or nodes[2] not in kept:
                raise FormatError("not an array of this parameter", where=where, value=array)
            return kept[nodes[2]]

        if inside:
            found[key] = put_tensors(tree, saved, where)
            for array in inside:
                found.pop(split(array)[2], None)
    return found


def _saved(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The names of the arrays of optimizers, by parameter and key."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.arrays:
        if name.startswith("optimizer/"):
            _, parameter, key = split(name)
            found.setdefault(parameter, {})[key] = name
    return found


def _wrappers(checkpoint: Checkpoint) -> dict[str, dict[str, Saved]]:
    """What is kept in tensors that are made of others, by parameter and key: what optimizers keep,
    and under no key the parameter itself.
    """
    found: dict[str, dict[str, Saved]] = {}
    for item in checkpoint.manifest.objects:
        group, *nodes = split(item.name.removeprefix(f"{WRAPPED}/"))
        if not item.name.startswith(f"{WRAPPED}/") or group not in (MODEL, OPTIMIZER):
            continue
        record = item.value if isinstance(item.value, dict) else {}
        dtype, shape = getattr(torch, str(record.get("dtype")), None), record.get("shape")
        is_named = len(nodes) == (2 if group == OPTIMIZER else 1)
        if not (is_named and isinstance(dtype, torch.dtype) and isinstance(shape, list)):
            raise FormatError("not what a save writes", where=f"objects.{item.name}", value=record)
        kept = Saved(tuple(shape), dtype, is_like_parameter=True, is_wrapper=True)
        found.setdefault(nodes[0], {})["".join(nodes[1:])] = kept
    return found


def _as_here(
    checkpoint: Checkpoint, name: str, parameter: str, wrapper: Saved | None, held: LiveTensor
) -> Saved:
    """The array with the dtype of the parameter here, where it had that of the one there."""
    array, of = checkpoint[name], wrapper or checkpoint[parameter]
    own = torch_dtype(array.dtype)
    there = of.dtype if isinstance(of, Saved) else torch_dtype(of.dtype)
    alike = own == there and array.shape == of.shape
    return Saved(array.shape, held.local.dtype if alike else own, array.shape == held.shape)


def _renamed(document: dict[str, Any], theirs: Mapping[str, str]) -> dict[str, Any]:
    """The document of an optimizer, with the names of here."""
    ours: dict[str, list[str]] = {}
    for name, there in theirs.items():
        ours.setdefault(there, []).append(name)
    return {
        "kind": document["kind"],
        "groups": [
            {**group, "params": [name for there in group["params"] for name in ours.get(there, ())]}
            for group in document["groups"]
        ],
        "values": {
            name: value
            for there, value in document["values"].items()
            for name in ours.get(there, ())
        },
    }


def trained_by(documents: Documents, kind: str | None = None) -> set[str]:
    """The parameters of all optimizers, or of those of one kind."""
    return {
        name
        for document in documents
        if kind is None or document["kind"] == kind
        for group in document["groups"]
        for name in group["params"]
    }
