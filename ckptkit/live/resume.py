"""What a model and its optimizers take over from a step: of optimizers the state of the parameters
that fit it, under the names that these have here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import Band, Limits, stored_arrays, stream
from ckptkit.errors import FormatError
from ckptkit.format.encoding import dumps
from ckptkit.format.names import MODEL, OPTIMIZER, WRAPPED, in_group, join, split
from ckptkit.format.objects import ObjectInfo
from ckptkit.live.snapshot import Snapshot
from ckptkit.live.state.entries import Saved, SavedState, StateMismatchError
from ckptkit.live.state.ranks import Documents
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state.trees import arrays_in, put_tensors
from ckptkit.live.wrappers import Training
from ckptkit.live.wrappers.optimizers import options_alike

_COMPARE_MEMORY = 64 << 20

Twins: TypeAlias = Mapping[str, Sequence[str]]
"""By each name of a tied parameter all of its names, that one first."""


SavedArrays: TypeAlias = Mapping[str, Mapping[str, str]]
"""Of what the step has of optimizers, the name of the array by parameter and key."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that is taken over, and the optimizers' documents as if it had been saved here."""

    state: SavedState
    arrays: Mapping[str, str]
    """The name that the step has each tensor of an optimizer under."""
    documents: Documents

    def of_kind(self, kind: str) -> SavedState:
        """What optimizers of one kind kept, by parameter."""
        mine = trained_by(document for document in self.documents if document["kind"] == kind)
        return {name: kept for name, kept in self.state.items() if name in mine}


def trained_by(documents: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters of some optimizers, with the options of their groups."""
    groups = [group for document in documents for group in document["groups"]]
    return {name: group["options"] for group in groups for name in group["params"]}


def torn_options(documents: Documents, saved: Documents) -> list[str]:
    """The options of groups here that the step has several of, as it has more groups."""
    found = []
    for document in documents:
        there = trained_by(each for each in saved if each["kind"] == document["kind"])
        for group in document["groups"]:
            _, apart = options_alike(group["params"], there)
            which = f"for the group of {''.join(group['params'][:1])}, which was several groups"
            found += [f"{OPTIMIZER}: one {key} {which}" for key in apart if key in group["options"]]
    return found


def saved_documents(objects: Mapping[str, ObjectInfo]) -> Documents:
    """What the step says of its optimizers besides tensors."""
    if OPTIMIZER not in objects:
        return []
    value = objects[OPTIMIZER].value
    wrong = not isinstance(value, list) or not all(
        isinstance(d, dict) and {"kind", "groups", "values"} <= d.keys() for d in value
    )
    if wrong:
        raise FormatError("not what a save writes", where=f"objects.{OPTIMIZER}", value=value)
    return value  # type: ignore[no-any-return]


def resume(
    checkpoint: Checkpoint,
    documents: Documents,
    parameters: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
    twins: Twins,
    saved: SavedArrays,
) -> Resumed:
    """What the step has for parameters that fit it: their names, shapes and dtypes."""
    trained = trained_by(documents)
    made = made_of(in_group(WRAPPED, {o.name: o.value for o in checkpoint.manifest.objects}))
    alike = cache(Saved)  # as layers are
    ours: dict[str, list[str]] = {}
    state: dict[str, dict[str, Any]] = {}
    arrays: dict[str, str] = {}
    for name, own_shape, own_dtype in parameters:
        there = next((each for each in twins.get(name, [name]) if each in trained), "")
        if not there:
            continue
        ours.setdefault(there, []).append(name)
        kept: dict[str, Any] = {}
        whole = made.get(there, {}).get("")
        of = None if whole is None else (whole.shape, whole.dtype)
        for key, array_name in saved.get(there, {}).items():
            if of is None and join(MODEL, there) in checkpoint:
                parameter = checkpoint.info(join(MODEL, there))
                of = parameter.shape, torch_dtype(parameter.dtype)
            arrays[array_name if name == there else join(OPTIMIZER, name, key)] = array_name
            array = checkpoint.info(array_name)
            shape, dtype = array.shape, torch_dtype(array.dtype)
            # In the dtype of the parameter here, where it had that of the one there.
            dtype = own_dtype if (shape, dtype) == of else dtype
            kept[key] = alike(shape, dtype, shape == own_shape)
        state[name] = completed(kept, made.get(there, {}), documents, there)

    renamed: Documents = []
    for document in documents:
        groups = []
        for group in document["groups"]:
            params = [name for there in group["params"] for name in ours.get(there, ())]
            groups.append({**group, "params": params})
        values = {
            name: value
            for there, value in document["values"].items()
            for name in ours.get(there, ())
        }
        renamed.append({"kind": document["kind"], "groups": groups, "values": values})
    return Resumed(state, arrays, renamed)


def completed(
    kept: Mapping[str, Saved], made: Mapping[str, Saved], documents: Documents, parameter: str
) -> dict[str, Any]:
    """What is kept for a parameter, by key, of which the arrays are known: in the place of those
    that a tensor is made of, that tensor; and where an optimizer keeps a list or a dictionary of
    tensors, that container, with what is saved of each tensor at its place.
    """
    inner = tuple(f"{key}/" for key in made if key)
    known = {key: each for key, each in kept.items() if not key.startswith(inner)}
    known |= {key: each for key, each in made.items() if key}
    found: dict[str, Any] = dict(known)
    said = (document["values"].get(parameter, {}) for document in documents)
    for key, tree in (pair for values in said for pair in values.items()):
        where = f"objects.optimizer: {parameter}, {key}"
        inside = dict.fromkeys(arrays_in(tree, where))

        def saved(array: str, where: str = where) -> Any:
            nodes = split(array)
            if nodes[:2] != (OPTIMIZER, parameter) or nodes[2:3] == () or nodes[2] not in known:
                raise FormatError("not an array of this parameter", where=where, value=array)
            return known[nodes[2]]

        if inside:
            found[key] = put_tensors(tree, saved, where)
            for array in inside:
                found.pop(split(array)[2], None)
    return found


def without_state(
    documents: Documents, saved: Documents, kept: SavedArrays, twins: Twins
) -> list[str]:
    """The parameters of the optimizers here whose state would begin anew without a word: those that
    saved kept state, and did not have them. Of a parameter that they had there may be none yet.
    """
    trained, found = trained_by(saved), list[str]()
    for document in documents:
        alike = [each for each in saved if each["kind"] == document["kind"]]
        if any(each["values"] for each in alike) or not kept.keys().isdisjoint(trained_by(alike)):
            mine = trained_by([document])
            found += [name for name in mine if trained.keys().isdisjoint(twins.get(name, [name]))]
    return found


def check_order(
    checkpoint: Checkpoint,
    saved: Iterable[Mapping[str, Any]],
    documents: Iterable[Mapping[str, Any]],
    ranks: Ranks,
) -> None:
    """Refuse state that was given to parameters by their order where the optimizer here, which is
    likely made as that one was, has them in another.
    """
    names = (name for doc in saved for group in doc["groups"] for name in group["params"])
    place = {name: number for number, name in enumerate(names)}
    groups = [group["params"] for document in documents for group in document["groups"]]
    places = [[place[name] for name in group if name in place] for group in groups]
    fits = ranks.agree(all(each == sorted(each) for each in places), all)
    if not fits:
        raise StateMismatchError(
            "the saved optimizer only counts its parameters, and the one here has them in another "
            "order than the model: whose state is whose is not known",
            where=checkpoint.location,
            hint="save it again, by an optimizer of model.named_parameters() or by "
            "ckptkit.live.save; or load without the optimizer",
        )


def saved_arrays(checkpoint: Checkpoint) -> SavedArrays:
    """The names of the arrays of optimizers."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.names:
        if name.startswith(f"{OPTIMIZER}/"):
            _, parameter, key = split(name)
            found.setdefault(parameter, {})[key] = name
    return found


def made_of(records: Mapping[str, Any]) -> dict[str, dict[str, Saved]]:
    """What is kept in tensors that are made of others, whose records are here by name, by parameter
    and key: what optimizers keep, and under no key the parameter itself.
    """
    found: dict[str, dict[str, Saved]] = {}
    for name, value in records.items():
        group, *nodes = split(name)
        if group not in (MODEL, OPTIMIZER):
            continue
        record = value if isinstance(value, dict) else {}
        dtype, shape = getattr(torch, str(record.get("dtype")), None), record.get("shape")
        is_named = len(nodes) == (2 if group == OPTIMIZER else 1)
        if not (is_named and isinstance(dtype, torch.dtype) and isinstance(shape, list)):
            where = f"objects.{WRAPPED}/{name}"
            raise FormatError("not what a save writes", where=where, value=record)
        kept = Saved(tuple(shape), dtype, is_like_parameter=True, is_wrapper=True)
        found.setdefault(nodes[0], {})["".join(nodes[1:])] = kept
    return found


def twins_of(checkpoint: Checkpoint, tied: Mapping[str, str]) -> Twins:
    """The parameters that are tied, in the step or here."""
    pairs = [(alias.name, alias.alias_of) for alias in checkpoint.manifest.aliases]
    pairs += tied.items()
    together: dict[str, set[str]] = {}
    for pair in pairs:
        names = [name.removeprefix("model/") for name in pair if name.startswith("model/")]
        joint = set(names).union(*(together.get(name, ()) for name in names))
        together |= dict.fromkeys(joint, joint)
    return {name: [name, *sorted(joint - {name})] for name, joint in together.items()}


def untied(
    checkpoint: Checkpoint, tied: Mapping[str, str], documents: Documents, kept: SavedArrays
) -> list[list[str]]:
    """The pairs of arrays of the step, by name, of which a tensor here can be only one: those of
    tied names that were not, and what optimizers had for them.
    """
    aliases = {alias.name: alias.alias_of for alias in checkpoint.manifest.aliases}
    first: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for second, of in tied.items():
        for name in (of, second):
            own = aliases.get(name, name)
            if name in checkpoint and first.setdefault(of, own) != own:
                pairs[first[of], own] = None
    if not pairs:
        return []
    said: dict[str, bytes] = {}  # of each parameter, besides tensors
    for document in documents:
        for group in document["groups"]:
            for name in group["params"]:
                values = document["values"].get(name, {})
                told = [sorted(each.items()) for each in (group["options"], values)]
                said[name] = dumps([document["kind"], told])
    for pair in list(pairs):
        a, b = (split(name)[1] for name in pair)
        if a in said and b in said:
            for key in sorted(kept.get(a, {}).keys() | kept.get(b, {}).keys()):
                pairs[join(OPTIMIZER, a, key), join(OPTIMIZER, b, key)] = None
            if said[a] != said[b]:  # no arrays: their groups have other options
                pairs[join(OPTIMIZER, a), join(OPTIMIZER, b)] = None
    return [list(pair) for pair in pairs]


def differing(
    checkpoint: Checkpoint, pairs: Sequence[Sequence[str]], *, threads: int | None
) -> list[str]:
    """Of pairs of arrays those that are not the same to the bit, read in bounded memory."""
    memory = _COMPARE_MEMORY + checkpoint.packs.kept_bytes
    limits = Limits.of(memory, threads, sides=2, sources=[checkpoint])
    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    found = [[stored[name] for name in pair if name in stored] for pair in pairs]
    # The others differ without a look: one of them is missing, or has another shape or dtype.
    alike = [
        at
        for at, pair in enumerate(found)
        if len(pair) == 2 and len({(each.shape, each.dtype) for each in pair}) == 1
    ]
    apart = set(range(len(pairs))) - set(alike)

    def compare(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        if not np.array_equal(values[0], values[1]):
            apart.add(alike[band.item])

    stream([found[at] for at in alike], compare, limits)
    return [
        f"{pairs[at][1]}: not what {pairs[at][0]} is in the step, and one tensor here"
        for at in sorted(apart)
    ]


def hand_over(
    training: Training, snapshot: Snapshot, values: Mapping[str, Any], documents: Documents
) -> None:
    """Once tensors are filled, give the model the values that are no tensors, by name, and
    optimizers what their documents say.
    """
    if training.model is None:
        return
    training.model.absorb(
        [e._replace(value=values[e.name]) if e.name in values else e for e in snapshot.entries]
    )
    names = training.names(snapshot.entries)
    for optimizer, states in zip(training.optimizers, snapshot.states, strict=True):
        mine = [document for document in documents if document["kind"] == optimizer.kind]
        kept = {name: v for document in mine for name, v in document["values"].items()}
        optimizer.absorb(names, states, kept, trained_by(mine))
