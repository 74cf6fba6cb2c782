"""A checkpoint of Orbax: a step with items, each a tree of values, or one such item.

A value is an array of Zarr, whose name is that of its path with dots; strings are in a file of
their own. What is what in the tree is told by the habits of Flax and Optax.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import ForeignStep
from ckptkit.foreign.folder import Folder, Place, parsed
from ckptkit.foreign.readers.tensorstore import MANIFEST, Arrays, read_database
from ckptkit.foreign.spread import MeshPart, strategy_of
from ckptkit.foreign.states import States, StateTensor, step_counted
from ckptkit.format.names import join
from ckptkit.model import Placement, Replicate, Shard, Strategy, document

METADATA, ROOT = "_METADATA", "_CHECKPOINT_METADATA"
_SHARDING, _STRINGS, _JSON = "_sharding", "_strings.json", "metadata"
_UNFINISHED = ".orbax-checkpoint-tmp"
_STATES = ("default", "state", "train_state", "pytree")
_NUMBER = re.compile(r"(?:.*[_-])?([0-9]{1,15})", re.ASCII)
_MODEL = ("params", "model")
# States of Optax that have the shape of the parameter.
_ALIKE = ("mu", "nu", "nu_max", "trace")
_OPTIMIZER = ("opt_state", "optimizer", "optimizer_state", "opt")
_ARRAYS = ("jax.Array", "np.ndarray")
_MOST_RANKS = 1 << 24

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A value of a tree: its path in the step, its name in its item, and what it was."""

    path: Path
    name: str
    kind: str

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def read_orbax(folder: Folder) -> ForeignStep:
    """The step or the item in a folder."""
    location = folder.store.location
    if _UNFINISHED in str(location):
        raise FormatError(
            "a save that was not finished",
            where=str(location),
            hint="Orbax takes the ending off when a save is complete; take another step",
        )
    root = _json(folder, ROOT) if ROOT in folder.files else {}
    items = sorted(
        key[: -len(METADATA)]
        for key in folder.files
        if key.rpartition("/")[2] == METADATA and key.count("/") <= 1
    )
    if not items:
        raise FormatError(
            "no item with a tree of arrays is in the checkpoint",
            where=folder.where(METADATA),
            hint="the save was not finished, it is older than Orbax 0.5, or only part of it was "
            "copied",
        )
    found = States(str(location))
    arrays = Arrays(folder)
    leaves: dict[_Leaf, StateTensor] = {}
    told: dict[_Leaf, dict[str, Any]] = {}
    keys: dict[_Leaf, str] = {}
    tree: dict[str, Any] = {}
    for item in items:
        # The name of an item tells what is in it, as keys of one tree do; that of all of the state
        # tells nothing.
        is_all = item[:-1] in ("", *_STATES) or (
            len(items) == 1 and item[:-1] not in (*_MODEL, *_OPTIMIZER)
        )
        above = () if is_all else (item[:-1],)
        of_item = _read_item(folder, item, above, arrays, found, tree)
        leaves |= of_item
        told |= _shardings(folder, item, of_item)
        keys |= _random_keys(folder, item, of_item)
    name_of = _add_arrays(found, leaves, keys)
    _add_others(folder, root, items, found)
    strategy, with_placements = _strategy(found, told, leaves, name_of)
    number = next(filter(None, map(_NUMBER.fullmatch, (location.name, location.parent.name))), None)
    nanoseconds = root.get("commit_timestamp_nsecs")
    if type(nanoseconds) is not int or not 0 < nanoseconds < 1 << 63:
        nanoseconds = 0
    keys_of = {name_of[leaf]: keys[leaf] for leaf in leaves if leaf in keys}
    return ForeignStep(
        format="Orbax",
        files={key: folder.size(key) for key in arrays.files},
        arrays=with_placements,
        objects=[*found.objects.values()],
        strategy=strategy,
        theirs=found.theirs,
        details=found.details | ({"random_keys": keys_of} if keys_of else {}),
        step=step_counted(tree) or (int(number[1]) if number else 0),
        time=nanoseconds / 1e9,
        encoded=tuple(arrays.encoded.values()),
    )


def _json(folder: Folder, key: str) -> dict[str, Any]:
    said = parsed(folder.read(key), folder.where(key))
    if not isinstance(said, dict):
        raise FormatError("not the metadata of Orbax", where=folder.where(key))
    return said


def _read_item(
    folder: Folder, item: str, above: Path, arrays: Arrays, found: States, tree: dict[str, Any]
) -> dict[_Leaf, StateTensor]:
    """The arrays of an item; its plain values are put where they belong, and those that may be the
    number of the step into the tree too.
    """
    said = _json(folder, f"{item}{METADATA}")
    values = _values(folder, item, said)
    strings = _json(folder, f"{item}{_STRINGS}") if f"{item}{_STRINGS}" in folder.files else {}
    leaves: list[_Leaf] = []
    for leaf in _leaves(said, above, folder.where(f"{item}{METADATA}")):
        name = join("extra", leaf.dotted)
        if leaf.kind in (*_ARRAYS, "scalar"):
            leaves.append(leaf)
        elif leaf.name in strings:
            found.keep(name, strings[leaf.name])
        elif leaf.kind == "string":
            raise FormatError(
                "a text is missing", where=folder.where(f"{item}{_STRINGS}"), value=name
            )
        elif leaf.kind not in ("None", "Dict", "List", "NamedTuple", "Tuple"):
            found.left_out[name] = f"a value of the type {leaf.kind}"
    # Before Orbax said so, tensorstore left out what was all zeros. In a database it is certain
    # that it did; a file may have been lost.
    is_whole = said.get("store_array_data_equal_to_fill_value") is True
    in_database = f"{item}{MANIFEST}" in folder.files
    read = arrays.read(
        values, [leaf.name for leaf in leaves], lacks_zeros=in_database and not is_whole
    )
    tensors = {leaf: StateTensor(*read[leaf.name]) for leaf in leaves}
    for leaf, tensor in [*tensors.items()]:
        is_scalar = leaf.kind == "scalar" and not tensor.shape
        is_step = leaf.path[-1:] == ("step",) and len(leaf.path) <= 2 and not tensor.shape
        if is_scalar or is_step:
            value = arrays.scalar(tensor.dtype, tensor.extents[0])
            if is_scalar:
                found.keep(join("extra", leaf.dotted), value)
                del tensors[leaf]
            if is_step:
                tree["step"] = value
    return tensors


def _values(folder: Folder, item: str, said: Mapping[str, Any]) -> dict[str, Place]:
    """Where each key of the arrays of an item is: in its database, or in a file of that name."""
    if f"{item}{MANIFEST}" in folder.files:
        return read_database(folder, item)
    if said.get("use_ocdbt") or any(
        key.startswith(f"{item}ocdbt.process_") for key in folder.files
    ):
        raise FormatError(
            "the database of all processes is missing",
            where=folder.where(f"{item}{MANIFEST}"),
            hint="the save was not finished: it is written last; take another step",
        )
    return {
        key[len(item) :]: Place(key, 0, stored.size)
        for key, stored in folder.files.items()
        if key.startswith(item)
    }


def _leaves(said: Mapping[str, Any], above: Path, where: str) -> Iterator[_Leaf]:
    entries: Any = said.get("tree_metadata")
    seen: set[str] = set()
    for entry in entries.values() if isinstance(entries, dict) else (entries,):
        try:
            nodes = tuple(str(node["key"]) for node in entry["key_metadata"])
            kind = document.text(entry["value_metadata"]["value_type"], where)
        except (KeyError, TypeError) as error:
            raise FormatError("not the metadata of a tree", where=where) from error
        name = ".".join(nodes)
        if name in seen or not all(nodes):
            raise FormatError("two values have this name, or one has none", where=where, value=name)
        seen.add(name)
        if nodes:
            yield _Leaf((*above, *nodes), name, kind)


def _add_arrays(
    found: States, leaves: Mapping[_Leaf, StateTensor], keys: Container[_Leaf]
) -> dict[_Leaf, str]:
    """Add all arrays, by the names that they get."""
    tops = {leaf.path[0] for leaf in leaves}
    model = next((top for top in _MODEL if top in tops), None)
    # A tree without either is a model, as people publish them.
    is_bare = model is None and not tops & {*_OPTIMIZER}
    in_model = {
        leaf: join("model", ".".join(leaf.path if is_bare else leaf.path[1:] or leaf.path))
        for leaf in leaves
        if leaf not in keys and (is_bare or leaf.path[0] == model)
    }
    parameters = {leaf.path[not is_bare :]: name for leaf, name in in_model.items()}
    shapes = {name: leaves[leaf].shape for leaf, name in in_model.items()}
    states = {
        leaf: state
        for leaf, tensor in leaves.items()
        if leaf.path[0] in _OPTIMIZER and (state := _state_of(leaf.path, parameters))
        # Others may have rows and columns.
        if state[0].rpartition("/")[2] not in _ALIKE or tensor.shape == shapes[state[1]]
    }
    taken = Counter(states.values())
    names: dict[_Leaf, str] = {}
    of: str | None
    for leaf, tensor in leaves.items():
        name, of = in_model.get(leaf) or join("other", leaf.dotted), None
        # Two optimizers may each have such a state of a parameter.
        if leaf in states and taken[states[leaf]] == 1:
            name, of = states[leaf]
        names[leaf] = found.add(name, tensor, leaf.path, of=of)
    return names


def _state_of(path: Path, parameters: Mapping[Path, str]) -> tuple[str, str] | None:
    """The name of an optimizer's state, and of its parameter, whose path its own ends with: the
    node before that is what the state is, unless that is a number.
    """
    for begin in range(2, len(path)):
        if (of := parameters.get(path[begin:])) and not path[begin - 1].isdecimal():
            return join("optimizer", ".".join(path[begin:]), path[begin - 1]), of
    return None


def _add_others(
    folder: Folder, root: Mapping[str, Any], items: Sequence[str], found: States
) -> None:
    """What the items are that have no arrays, and what else was said of the step."""
    if said := root.get("custom_metadata"):
        found.keep(join("extra", "custom_metadata"), said)
    handlers = root.get("item_handlers")
    for item, handler in (handlers if isinstance(handlers, dict) else {}).items():
        key = f"{item}/{_JSON}"
        if f"{item}/" in items:
            continue
        if str(handler).endswith("JsonCheckpointHandler") and key in folder.files:
            found.keep(join("extra", item), parsed(folder.read(key), folder.where(key)))
        else:
            kind = str(handler).rpartition(".")[2]
            found.left_out[join("extra", item)] = f"an item that {kind} wrote"


def _random_keys(folder: Folder, item: str, leaves: Mapping[_Leaf, Any]) -> dict[_Leaf, str]:
    """Which arrays are keys of random numbers, and of which kind."""
    by_name = {leaf.name: leaf for leaf in leaves}
    found: dict[_Leaf, str] = {}
    for key in sorted(folder.files):
        if key.startswith(f"{item}array_metadatas/process_"):
            rows = _json(folder, key).get("array_metadatas")
            for row in rows if isinstance(rows, list) else ():
                said = row.get("array_metadata") if isinstance(row, dict) else None
                more = said.get("ext_metadata") if isinstance(said, dict) else None
                kind = more.get("random_key_impl") if isinstance(more, dict) else None
                if kind and said and (name := str(said.get("param_name"))) in by_name:
                    found[by_name[name]] = str(kind)
    return found


def _shardings(folder: Folder, item: str, leaves: Mapping[_Leaf, Any]) -> dict[_Leaf, Any]:
    """What is told of how arrays lay over devices."""
    key = f"{item}{_SHARDING}"
    if key not in folder.files:
        return {}
    where = folder.where(key)
    by_name: dict[str, Any] = {}
    for name, said in _json(folder, key).items():
        try:
            decoded_name = base64.b64decode(name, validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise FormatError("not a name of an array", where=where, value=name) from error
        by_name[decoded_name] = parsed(document.text(said, where).encode(), where)
    return {leaf: by_name[leaf.name] for leaf in leaves if leaf.name in by_name}


def _strategy(
    found: States,
    told: Mapping[_Leaf, Any],
    leaves: Mapping[_Leaf, StateTensor],
    name_of: Mapping[_Leaf, str],
) -> tuple[Strategy | None, list[Any]]:
    """What wrote it, where that is told of all arrays that are of devices."""
    spreads: dict[str, MeshPart] = {}
    for leaf, tensor in leaves.items():
        if leaf.kind == "np.ndarray":
            continue
        spread = _spread(tensor.shape, told.get(leaf))
        if spread is None:
            return None, found.arrays
        spreads[name_of[leaf]] = spread
    with_mesh = {name: spread for name, spread in spreads.items() if spread.mesh}
    if not with_mesh:
        return (Strategy.of("single") if spreads else None), found.arrays
    ranks = max(math.prod(size for _, size in spread.mesh) for spread in with_mesh.values())
    return strategy_of(with_mesh, found.arrays, ranks)


def _spread(shape: tuple[int, ...], said: Any) -> MeshPart | None:
    """How an array lay over a mesh of devices; axes of one device tell nothing."""
    if not isinstance(said, dict):
        return None
    if said.get("sharding_type") == "SingleDeviceSharding":
        return MeshPart(shape, None)
    sizes, names, spec = (said.get(key) for key in ("shape", "axis_names", "partition_spec"))
    if (
        said.get("sharding_type") != "NamedSharding"
        or not (isinstance(sizes, list) and isinstance(names, list) and isinstance(spec, list))
        or len(sizes) != len(names)
        or len(spec) > len(shape)
        or not all(type(size) is int and 0 < size <= _MOST_RANKS for size in sizes)
        or not all(type(name) is str for name in names)
    ):
        return None
    mesh = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)
    order = [name for name, _ in mesh]
    placements: list[Placement] = [Replicate()] * len(mesh)
    for dim, cut in enumerate(spec):
        axes = [cut] if isinstance(cut, str) else cut or []
        places = [order.index(axis) for axis in axes if axis in order]
        parts = math.prod(mesh[place][1] for place in places)
        # Placements cut a dim from the first axis to the last.
        is_known = all(axis in names for axis in axes) and places == sorted({*places})
        if not is_known or shape[dim] % parts:
            return None
        for place in places:
            placements[place] = Shard(dim)
    return MeshPart(shape, None, mesh, tuple(placements))
