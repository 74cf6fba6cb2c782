"""What ranks of model parallelism have, put together: the layers of a pipeline by their names, and
parts of tensors by the patterns that DeepSpeed keeps for its Universal Checkpoints; and what such a
checkpoint has, in which its script has done so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.files import (
    MIXED,
    OTHERWISE,
    UNIVERSAL,
    TagFiles,
    as_dict,
    likeness,
    same_on_all,
)
from ckptkit.foreign.deepspeed.zero import Zero
from ckptkit.foreign.extents import Extent, c_order
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.foreign.states import StateTensor
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import Box, Placement, Replicate, Shard, document
from ckptkit.model.box import flat_boxes

_TIED = "tied_modules."
# Of a weight made of several, such as those for queries, keys and values.
_MOST_PARTS = 1 << 10
# Of a Universal Checkpoint.
_STATES = "optimizer_state.pt"
_FILE = re.compile(r"(?P<name>.+)/(?P<key>[^/]+)\.pt")


@dataclass(slots=True)
class ParallelModel:
    """A model and the state of its optimizer, whole or what one rank has of them."""

    tensors: dict[str, StateTensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    """By the names of `tensors`."""
    copies: dict[str, str] = field(default_factory=dict)
    """The types of the weights that are left out for those in full precision."""
    of_rank_0: set[str] = field(default_factory=set)
    """What differs between ranks that should have the same."""
    stages: dict[str, int] = field(default_factory=dict)
    """Of a pipeline, by the names of `tensors`; not of what several stages have."""
    cuts: dict[str, Placement] = field(default_factory=dict)
    """Over the ranks of tensor parallelism."""


def named(
    layers: Mapping[int, Mapping[str, Any]], known: Mapping[str, int | None], where: str
) -> dict[str, Any]:
    """The tensors of the layers of a pipeline by their names in the model, some of which are known,
    mostly with how many elements each has. A module that is in several layers is in the files of
    all of these, and has one name.
    """
    tied: dict[str, dict[str, int | None]] = {}
    for name, count in known.items():
        if name.startswith(_TIED):
            module, _, inner = name.removeprefix(_TIED).partition(".")
            tied.setdefault(f"{_TIED}{module}", {})[inner] = count
    found: dict[str, Any] = {}
    for layer, tensors in sorted(layers.items()):
        prefix = str(layer)
        if tensors and not any(f"{layer}.{name}" in known for name in tensors):
            has = {n: math.prod(t.shape) for n, t in tensors.items() if isinstance(t, StateTensor)}
            fitting = [
                module
                for module, counts in tied.items()
                if all(n in has and count in (None, has[n]) for n, count in counts.items())
            ]
            if len(fitting) > 1:
                raise FormatError(
                    f"layer {layer} may be any of several modules that layers share",
                    where=where,
                    value=sorted(fitting),
                )
            prefix = fitting[0] if fitting else prefix
        for name, value in tensors.items():
            if likeness(found.setdefault(f"{prefix}.{name}", value)) != likeness(value):
                raise FormatError(
                    f"layer {layer} looks as those that share {prefix}, and has another {name}",
                    where=where,
                    hint=f"{MIXED}; or it is a frozen layer of the same sizes, which nothing tells "
                    "from a shared one",
                )
    return found


@dataclass(frozen=True, slots=True)
class _Shift:
    """A region of what a rank has, and where in the whole tensor it begins."""

    rank: int
    region: Box
    begin: tuple[int, ...]


def joined(
    ranks: Sequence[ParallelModel],
    info: Any,
    whole: Iterable[str],
    files: Sequence[str],
    where: str,
) -> ParallelModel:
    """One model of those of all ranks of tensor parallelism, whose first `files` are named where
    they are not alike; the parameters `whole` are not cut.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank.tensors)
    for name in names:
        keys = {key for rank in ranks for key in rank.states.get(name, ())}
        for rank, file in zip(ranks, files, strict=True):
            lost = keys - rank.states.get(name, {}).keys()
            if name not in rank.tensors or lost:
                lacks = f"state {min(lost)} of {name}" if name in rank.tensors else name
                what = f"this rank of tensor parallelism has no {lacks}, and another one has"
                raise FormatError(what, where=file, hint=MIXED)
    patterns = _Patterns(info, len(ranks), where)
    first = ranks[0]
    found = replace(first, tensors={}, states={}, cuts={})
    uncut = set(whole)
    by_identity: dict[object, StateTensor] = {}
    for name in names:
        parts = [rank.tensors[name] for rank in ranks]
        states = [rank.states.get(name, {}) for rank in ranks]
        mine = parts[0]
        if mine.identity in by_identity:
            found.tensors[name] = by_identity[mine.identity]
            continue
        if name in uncut or (name in first.buffers and patterns.is_alike(name, parts)):
            found.tensors[name], found.cuts[name] = mine, Replicate()
        else:
            shape, moves, found.cuts[name] = patterns.moves(name, [part.shape for part in parts])
            found.tensors[name] = _moved(name, shape, moves, parts, where)
            states[0] = {
                key: _moved(name, shape, moves, [state[key] for state in states], where)
                if isinstance(value, StateTensor) and value.shape == mine.shape
                else same_on_all(f"{name}/{key}", [state[key] for state in states], where)
                for key, value in states[0].items()
            }
        by_identity[mine.identity] = found.tensors[name]
        if states[0]:
            found.states[name] = states[0]
    return found


class _Patterns:
    """What `universal_checkpoint_info` says of how each parameter is cut."""

    def __init__(self, info: Any, ranks: int, where: str) -> None:
        self._where = where
        self._ranks = ranks
        if not isinstance(info, dict):
            raise FormatError(
                f"{ranks} ranks of tensor parallelism have a part of each weight, and nothing says "
                "how they are cut",
                where=where,
                hint="save with `universal_checkpoint_info` in the checkpoint, as AutoTP and "
                "Megatron-DeepSpeed do, or gather the weights before they are saved",
            )
        self._info = info
        maps = as_dict(info.get("affine_map"))
        if (version := document.integer(maps.get("version", 1), where)) > 1:
            what = "a later version of affine_map"
            raise FormatError(what, where=where, value=version, hint=OTHERWISE)
        self._maps = as_dict(maps.get("params"))

    def _has(self, key: str, name: str) -> bool:
        return any(self._fitting(self._info.get(key), key, name))

    def _fitting(self, patterns: Any, key: str, name: str) -> Iterator[str]:
        """The patterns of a key that a name begins as. Only plain ones are tried: somebody else's
        regular expression may take for ever.
        """
        if not isinstance(patterns, (list, tuple, dict, NoneType)):
            raise FormatError("not a list of patterns", where=self._where, value=key)
        for pattern in patterns or ():
            text = document.text(pattern, self._where)
            repeats = re.findall(r"(?<!\\)[*+{]", text)
            if len(repeats) > 3 or (repeats and (len(name) > 256 or re.search(r"\)[*+{?]", text))):
                raise FormatError("a pattern that is not tried", where=self._where, value=text[:80])
            try:
                fits = re.match(text, name) is not None
            except re.error as error:
                raise FormatError("not a pattern", where=self._where, value=text[:80]) from error
            if fits:
                yield pattern

    def is_alike(self, name: str, parts: Sequence[Any]) -> bool:
        """Whether what is no parameter is the same on all ranks; FormatError where nobody knows."""
        if len({part.content for part in parts}) == 1 and parts[0].content is not None:
            return True
        if self._has("tp_replicated_parameter_patterns", name):
            return True
        known = ("parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns")
        shapes = [part.shape for part in parts]
        if any(self._has(key, name) for key in known) or self._sub_parameters(name, shapes):
            return False
        raise FormatError(
            f"nothing says how ranks have cut {name}, which is not alike on all", where=self._where
        )

    def moves(
        self, name: str, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[_Shift], Placement]:
        """The shape of the whole parameter, what of each rank is where in it, and how it is cut:
        where DeepSpeed tells each piece, as since 0.19, by these, and the cut is the nearest.
        """
        shape, moves, cut = self._by_category(name, shapes)
        if (told := self._maps.get(f"^{re.escape(name)}$")) is not None:
            shape, moves = self._by_map(name, as_dict(told), shapes)
        return shape, moves, cut

    def _by_map(
        self, name: str, told: Mapping[Any, Any], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[_Shift]]:
        """What `affine_map` says: pieces of several sizes, in any order, or that all ranks have."""
        where = f"{self._where}: affine_map of {name}"
        whole = document.integers(told.get("logical_shape"), where)
        moves: list[_Shift] = []
        for rank, has in enumerate(shapes):
            said = as_dict(as_dict(told.get("ranks")).get(rank))
            if (shape := document.integers(said.get("shard_shape"), where)) != has:
                raise FormatError(f"rank {rank} has the shape {has}", where=where, value=shape)
            pieces = said.get("pieces")
            for piece in map(as_dict, pieces if isinstance(pieces, list) else ()):
                size = document.integers(piece.get("shape"), where)
                holders = document.integers(piece.get("locations"), where)
                if 0 in size or rank != min(holders, default=rank):
                    continue
                corners = []
                for key, shape in (("dest", has), ("source", whole)):
                    view = piece.get(key)
                    at, steps = view if isinstance(view, list) and len(view) == 2 else (0, None)
                    is_box = document.integers(steps, where) == c_order(shape)
                    if not is_box or len(size) != len(shape) or "scale" in piece:
                        what = "a piece that is scaled, or no box"
                        raise FormatError(what, where=where, hint=OTHERWISE)
                    begin = document.integer(at, where)
                    corners += [box.offset for box in flat_boxes(shape, begin, begin + 1)]
                moves.append(_Shift(rank, Box(corners[0], size), corners[1]))
        return whole, moves

    def _by_category(
        self, name: str, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[_Shift], Placement]:
        """The same by the lists of patterns, which older versions have alone."""
        for key in ("autotp_unsupported_parameter_patterns", "parameter_to_average_patterns"):
            if self._has(key, name):
                raise FormatError(
                    f"{name} cannot be put together from the parts of ranks",
                    where=self._where,
                    value=key,
                )
        if self._has("tp_replicated_parameter_patterns", name):
            if len(set(shapes)) > 1:
                raise FormatError(f"{name} is not alike on all ranks", where=self._where)
            begin = (0,) * len(shapes[0])
            return shapes[0], [_Shift(0, Box.whole(shapes[0]), begin)], Replicate()
        dim, blocks = 0, None
        if self._has("parameter_with_2_sub_params_cat_dim_0", name):
            if any(not shape or shape[0] % 2 for shape in shapes):
                raise FormatError(f"{name} has no two halves", where=self._where, value=shapes)
            each = [shape[0] // 2 for shape in shapes]
            widths = [each, each]
        elif sub_parameters := self._sub_parameters(name, shapes):
            dim, widths = sub_parameters
        else:
            dim = int(self._has("parameter_with_row_parallelism_patterns", name))
            if any(len(shape) <= dim for shape in shapes):
                raise FormatError(f"{name} has no dim {dim} to be cut", where=self._where)
            widths = [[shape[dim] for shape in shapes]]
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        sums = [sum(part[rank] for part in widths) for rank in range(self._ranks)]
        if len(rest) > 1 or any(
            shape[dim : dim + 1] != (n,) for shape, n in zip(shapes, sums, strict=True)
        ):
            raise FormatError(
                f"the parts of {name} do not fit together along dim {dim}",
                where=self._where,
                value=list(shapes),
            )
        total = sum(sums)
        shape = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
        if self._has("vocabulary_parameter_patterns", name) and dim == 0:
            # Its last rows are padding.
            rows = document.integer(
                self._info.get("original_vocab_size"), f"{self._where}: original_vocab_size"
            )
            total = min(rows, total)
            shape = (total, *shape[1:])
        moves: list[_Shift] = []
        starts, at = [0] * self._ranks, 0
        for part in widths:
            for rank, width in enumerate(part):
                take = max(0, min(width, total - at))
                offset = tuple(starts[rank] if d == dim else 0 for d in range(len(shape)))
                size = tuple(take if d == dim else n for d, n in enumerate(shape))
                begin = tuple(at if d == dim else 0 for d in range(len(shape)))
                if take:
                    moves.append(_Shift(rank, Box(offset, size), begin))
                starts[rank] += width
                at += width
        if len(widths) > 1:
            blocks = tuple(sum(part) for part in widths)
        return shape, moves, Shard(dim, blocks if blocks and all(blocks) else None)

    def _sub_parameters(
        self, name: str, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[int, list[list[int]]] | None:
        """The dim along which a parameter of several is cut, and how wide what each rank has of
        each of them is.
        """
        said = self._info.get("parameter_with_sub_params") or ()
        widths = as_dict(self._info.get("sub_param_shard_widths"))
        for each in said if isinstance(said, (list, tuple)) else ():
            fields = as_dict(each)
            for pattern in self._fitting(fields.get("patterns"), "patterns", name):
                dim = document.integer(fields.get("partition_dim"), f"{self._where}: {name}")
                where = f"{self._where}: sub_param_shard_widths of {name}"
                told = widths.get(pattern)
                shape = fields.get("shape")
                if told is None and isinstance(shape, (list, tuple)) and dim < len(shape):
                    # Before version 0.4 all are cut evenly, and may be told by their number.
                    sizes = shape[dim]
                    version = self._info.get("universal_checkpoint_version", 0)
                    if type(sizes) is int and type(version) in (int, float) and version < 0.4:
                        count = document.integer(sizes, where, least=1, most=_MOST_PARTS)
                        sizes = [sum(sum(has[dim : dim + 1]) for has in shapes) // count] * count
                    if isinstance(sizes, (list, tuple)):
                        sizes = document.integers(sizes, where)
                        if any(size % self._ranks for size in sizes):
                            what = "its parts cannot be cut evenly"
                            raise FormatError(what, where=where, value=sizes)
                        told = [[size // self._ranks] * self._ranks for size in sizes]
                if not isinstance(told, (list, tuple)):
                    raise FormatError("nothing says how wide its parts are", where=where)
                found = [list(document.integers(part, where)) for part in told]
                if any(len(part) != self._ranks for part in found):
                    raise FormatError("not a width for each rank", where=where, value=found[:8])
                return dim, found
        return None


def _moved(
    name: str, shape: tuple[int, ...], moves: Sequence[_Shift], parts: Sequence[Any], where: str
) -> StateTensor:
    """A tensor whose extents are those of the parts, where they belong in the whole."""
    dtypes = {part.dtype.name: part.dtype for part in parts}
    if len(dtypes) > 1:
        raise FormatError(f"the parts of {name} are of several types", where=where)
    extents: list[Extent] = []
    for move in moves:
        part = parts[move.rank]
        size = part.dtype.itemsize
        steps = c_order(part.shape)
        for extent in part.extents:
            if part.is_flat:
                begin = extent.box.offset[0]
                pieces = [
                    Extent(
                        box,
                        extent.file,
                        extent.offset + (_dot(box.offset, steps) - begin) * size,
                        steps,
                    )
                    for box in flat_boxes(part.shape, begin, extent.box.stop[0])
                ]
            else:
                pieces = [replace(extent, strides=extent.strides or c_order(extent.box.shape))]
            for piece in pieces:
                inside = piece.box.intersect(move.region)
                if inside is None or inside.is_empty or piece.strides is None:
                    continue
                skipped = _dot(
                    [a - b for a, b in zip(inside.offset, piece.box.offset, strict=True)],
                    piece.strides,
                )
                to = tuple(
                    a - b + c
                    for a, b, c in zip(inside.offset, move.region.offset, move.begin, strict=True)
                )
                extents.append(
                    replace(piece, box=Box(to, inside.shape), offset=piece.offset + skipped * size)
                )
    (dtype,) = dtypes.values()
    return StateTensor(shape, dtype, tuple(extents), identity=object())


def _dot(numbers: Sequence[int], steps: Sequence[int]) -> int:
    return sum(n * step for n, step in zip(numbers, steps, strict=True))


def read_universal(
    folder: Folder, tagged: TagFiles, parts: Sequence[Sequence[Mapping[str, tuple[int, ...]]]]
) -> Zero:
    """What `ds_to_universal.py` writes, a folder for each parameter with a file for its master
    weight and one for each state: those of `param_shapes` of all parts of a model. Of all else in
    the folder the model's own files have what was saved: here it was made float32, and of tied
    parameters it is the copy.
    """
    top = f"{tagged.tag}{UNIVERSAL}"
    files: dict[str, dict[str, str]] = {}
    for key in tagged.universal:
        if match := _FILE.fullmatch(key.removeprefix(top)):
            files.setdefault(match["name"], {})[match["key"]] = key
    rows: list[dict[str, set[tuple[int, ...]]]] = []
    for shapes in parts:
        rows += [{} for _ in range(len(shapes) - len(rows))]
        for row, names in zip(rows, shapes, strict=False):
            for name, shape in names.items():
                row.setdefault(name, set()).add(shape)
    said = read_file(folder, f"{top}{_STATES}").tree
    if not isinstance(said, dict):
        raise FormatError("not the state of an optimizer", where=folder.where(f"{top}{_STATES}"))
    found = Zero()
    if isinstance(scaler := said.get("loss_scaler"), Placeholder):
        found.scaler = scaler.fields()
    parameters = [name for row in rows for name in row]
    keys = {key for name in parameters for key in files.get(name, {})} - {"fp32"}
    for number, shapes_by_name in enumerate(rows):
        own = _own_state(said, number)
        for name, known in shapes_by_name.items():
            there = files.get(name, {})
            # What got no gradient has no state.
            missing = {"fp32", *keys} - there.keys() if len(there) != 1 else {"fp32"} - there.keys()
            if missing:
                raise FormatError(
                    "a file of a parameter is missing",
                    where=folder.where(f"{top}{name}/{min(missing)}.pt"),
                    hint="it was not copied along; copy the folder again",
                )
            values = {key: _value(folder, file, known, parts) for key, file in there.items()}
            weight = values.pop("fp32")
            if not isinstance(weight, StateTensor):
                raise FormatError("no parameter is in the file", where=folder.where(there["fp32"]))
            if not weight.shape and () not in known:
                raise _other_shape(weight.shape, known, folder.where(there["fp32"]))
            found.weights[name] = weight
            if values:
                found.states[name] = own | values
    if "step" in keys:
        steps = [states["step"] for states in found.states.values()]
        same_on_all("step", steps, folder.where(top))
    groups = said.get("param_groups")
    groups = groups if isinstance(groups, list) else []
    for group in (each for each in groups if isinstance(each, dict)):
        numbers = document.integers(group.get("params"), f"{folder.where(top)}: params")
        params = [name for n in numbers if n < len(rows) for name in rows[n]]
        found.groups.append({**group, "params": params})
    return found


def _own_state(said: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What is no part of a parameter, such as the step: after stage 3 it is in one file for all."""
    states = as_dict(as_dict(said.get("optimizer_state_dict")).get("state"))
    return {
        key: value
        for key, value in as_dict(states.get(row)).items()
        if not isinstance(value, StateTensor) or not value.shape
    }


def _value(folder: Folder, file: str, known: set[tuple[int, ...]], parts: Sequence[Any]) -> Any:
    """What one file has: a tensor of the shape of the parameter, or a number."""
    said = read_file(folder, file).tree
    where = folder.where(file)
    if isinstance(said, dict):
        value = said.get("param")
        if not isinstance(value, StateTensor):
            raise FormatError("no parameter is in the file", where=where)
        # Ranks of tensor parallelism had parts of it, or the padding of a vocabulary was cut.
        if value.shape not in known and len(parts) == 1 and not said.get("vocab_tensor"):
            raise _other_shape(value.shape, known, where)
        return value
    if not isinstance(said, StateTensor) or not said.shape:
        return said
    # After stage 3 it is one row.
    (shape,) = known if len(known) == 1 else (said.shape,)
    if said.shape != shape and (said.shape != (math.prod(shape),) or said.extents[0].strides):
        raise _other_shape(said.shape, known, where)
    row = replace(said.extents[0], box=Box((0,), (math.prod(shape),)))
    return replace(said, shape=shape, extents=(row,), is_flat=True)


def _other_shape(found: object, known: object, where: str) -> FormatError:
    return FormatError(
        f"it has the shape {found}, by param_shapes {known}", where=where, hint=MIXED
    )
