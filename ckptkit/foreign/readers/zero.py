"""What ZeRO has cut: groups of parameters as one long row each, of which every rank has a piece.

Nothing in a piece says whose elements it holds. `param_shapes` of the model's file has the names
and shapes in the order of the rows. Stages 1 and 2 cut each row into equal pieces, wherever that
falls; stage 3 cuts each parameter for itself, and a rank's pieces lie one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.interpreter import Placeholder
from ckptkit.foreign.readers.samples import check_paddings
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box, document

MIXED = "the files are of different saves; copy the folder of one of them again"


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a parameter that lie together in a piece of a rank."""

    rank: int
    row: int
    start: int
    """In the piece."""
    begin: int
    """In the parameter."""
    count: int


@dataclass(frozen=True, slots=True)
class _Parameter:
    shape: tuple[int, ...]
    runs: tuple[_Run, ...]
    row: int


@dataclass(slots=True)
class _Piece:
    """What the optimizer's file of one rank says: of each row its piece."""

    where: str
    said: Mapping[str, Any]
    stage: int
    weights: list[StateTensor] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]


class _ByRank(list[Any]):
    """Of each rank its piece of a state."""


@dataclass(slots=True)
class Zero:
    """What the optimizer's files of all ranks hold, by parameter."""

    weights: dict[str, StateTensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    """As torch has them, with names in place of numbers."""
    left_out: dict[str, str] = field(default_factory=dict)
    scaler: Mapping[str, Any] = field(default_factory=dict)
    """What scales the loss, where something does."""


def read_zero(
    folder: Folder,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    files: Sequence[tuple[str, Mapping[str, Any]]],
    stage: int,
    *,
    reordered: bool,
) -> Zero:
    """What is in the optimizer's files of the ranks 0, 1, …: of each where it is, and what it
    says. With `reordered` its own list of fragments is of another order than the elements are.
    """
    pieces = [_piece(where, said, stage, len(files)) for where, said in files]
    for piece in pieces[1:]:
        if len(piece.weights) != len(pieces[0].weights):
            raise FormatError(
                f"rank 0 has {len(pieces[0].weights)} groups, this one {len(piece.weights)}",
                where=piece.where,
                hint=MIXED,
            )
        if _plain(piece.groups) != _plain(pieces[0].groups):
            raise FormatError(
                "its options of the optimizer are not those of rank 0",
                where=piece.where,
                hint=MIXED,
            )
    found = Zero()
    if isinstance(scaler := pieces[0].said.get("loss_scaler"), Placeholder):
        found.scaler = scaler.fields()
    parameters = _by_parameters(shapes, pieces) if stage == 3 else _by_rows(shapes, pieces)
    if stage < 3 and not reordered:
        _check_fragments(parameters, pieces)
    rows = [_states(row, pieces, found.left_out) for row in range(len(pieces[0].weights))]
    # Of each state, by rank, its pieces of all rows.
    cut = {
        key: [
            [row[key][rank] if type(row.get(key)) is _ByRank else None for row in rows]
            for rank in range(len(pieces))
        ]
        for key in dict.fromkeys(
            k for row in rows for k, value in row.items() if type(value) is _ByRank
        )
    }
    if stage == 3:
        check_paddings(
            folder, _paddings(shapes, pieces), [*cut.values()], [p.where for p in pieces]
        )
    weights = [piece.weights for piece in pieces]
    for name, parameter in parameters.items():
        found.weights[name] = _tensor(name, parameter, weights, pieces)
        states = {
            key: _tensor(f"{name}/{key}", parameter, cut[key], pieces)
            if type(said) is _ByRank
            else said
            for key, said in rows[parameter.row].items()
        }
        if states:
            found.states[name] = states
    for group in pieces[0].groups:
        numbers = document.integers(group.get("params"), f"{pieces[0].where}: params")
        names = [name for name, each in parameters.items() if each.row in numbers]
        found.groups.append({**group, "params": names})
    return found


def groups_of(zeros: Sequence[Zero]) -> list[dict[str, Any]]:
    """The groups of parameters of all stages; those with the same options are one."""
    found: dict[str, dict[str, Any]] = {}
    for number, group in ((n, group) for zero in zeros for n, group in enumerate(zero.groups)):
        options = {key: value for key, value in group.items() if key != "params"}
        into = found.setdefault(f"{number} {options!r}", {**options, "params": {}})
        into["params"] |= dict.fromkeys(group["params"])
    return [{**group, "params": list(group["params"])} for group in found.values()]


def shapes_of(said: Any, where: str) -> list[dict[str, tuple[int, ...]]]:
    """The `param_shapes` of a model's file: names and shapes of each row, in order."""
    if not isinstance(said, (list, tuple)) or not all(isinstance(each, dict) for each in said):
        raise FormatError("param_shapes are no list of shapes by name", where=where)
    found = [
        {
            document.text(name, where): document.integers(shape, f"{where}: {name}")
            for name, shape in each.items()
        }
        for each in said
    ]
    names = [name for each in found for name in each]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError("a parameter is twice in param_shapes", where=where, value=twice)
    return found


def shapes_by_fragments(
    files: Sequence[tuple[str, Any]], module: Mapping[str, Any]
) -> list[dict[str, tuple[int, ...]]]:
    """The same, where only the ranks' own lists of fragments have the names in order; the shapes
    are those of the copies in the model, where these are known.
    """
    found: list[dict[str, int]] = []
    for where, said in files:
        told = said.get("param_slice_mappings") if isinstance(said, dict) else None
        if not isinstance(told, list) or (found and len(told) != len(found)):
            raise FormatError("nothing says which parameters are where", where=where)
        found = found or [{} for _ in told]
        for row, names in zip(found, told, strict=True):
            for name, at in names.items() if isinstance(names, dict) else ():
                fields = at.fields() if isinstance(at, Placeholder) else {}
                count = document.integer(fields.get("numel"), f"{where}: {name}")
                row[document.text(name, where)] = row.get(name, 0) + count
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in found]
    for row, into in zip(found, shapes, strict=True):
        for name, count in row.items():
            copy = module.get(name)
            known = copy.shape if isinstance(copy, StateTensor) else (count,)
            if math.prod(known) != count:
                raise FormatError(
                    f"{name} of the model has the shape {known}, that of the optimizer {count} "
                    "elements",
                    where=files[0][0],
                    hint=MIXED,
                )
            into[name] = known
    return shapes


def pieces_of(
    name: str, shape: tuple[int, ...], ranks: Sequence[StateTensor], where: str
) -> StateTensor:
    """A tensor of which each rank has a part of its own, one after the other, as stage 3 cuts."""
    numel = math.prod(shape)
    part = -(-numel // len(ranks))
    if any(each.shape != (part,) for each in ranks):
        raise FormatError(
            f"the parts of {name} are not {part} elements each",
            where=where,
            value=[each.shape for each in ranks][:8],
            hint=MIXED,
        )
    runs = tuple(
        _Run(rank, 0, 0, rank * part, min(part, numel - rank * part))
        for rank in range(len(ranks))
        if rank * part < numel
    )
    return _tensor(name, _Parameter(shape, runs, 0), [[each] for each in ranks], where)


def _piece(where: str, said: Any, stage: int, world: int) -> _Piece:
    """What one rank's file says, its shape checked."""
    if not isinstance(said, dict):
        raise FormatError("no optimizer is in the file", where=where)
    counts = said.get("partition_count", world)
    counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
    if "ds_zero_partition_groups" in said or any(
        type(count) is not int or count != world for count in counts
    ):
        raise FormatError(
            f"its groups are cut for {sorted(set(map(str, counts)))} ranks, there are the files of "
            f"{world}",
            where=where,
            hint="files of other ranks are missing or too many; what cuts experts, or shards in "
            "groups of ranks (MiCS), is not read here",
        )
    rows = said.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    inner = said.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if not isinstance(rows, (list, tuple)):
        raise FormatError("the file has no master weights", where=where, hint=MIXED)
    piece = _Piece(where, said, stage)
    for row, weight in enumerate(rows):
        if not _is_row(weight):
            raise FormatError(
                "a group of weights that is no row of numbers", where=where, value=row
            )
        piece.weights.append(weight)
    if isinstance(inner, dict):
        groups, states = inner.get("param_groups"), inner.get("state")
        if not isinstance(groups, list) or not isinstance(states, dict):
            raise FormatError("not the state of an optimizer of torch", where=where)
        piece.groups = [group for group in groups if isinstance(group, dict)]
        by_row = [states.get(row, {}) for row in range(len(rows))]
        piece.states = [state if isinstance(state, dict) else {} for state in by_row]
    elif isinstance(inner, list) and len(inner) == len(rows):  # of an elastic checkpoint
        piece.states = [state if isinstance(state, dict) else {} for state in inner]
    else:
        raise FormatError("the file has no state of an optimizer", where=where, hint=MIXED)
    return piece


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, StateTensor)
        and len(value.shape) == 1
        and value.extents[0].strides is None
    )


def _by_rows(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], pieces: Sequence[_Piece]
) -> dict[str, _Parameter]:
    """Where the elements of each parameter are, as stages 1 and 2 cut."""
    first = pieces[0]
    if len(shapes) != len(first.weights):
        raise FormatError(
            f"the model has {len(shapes)} groups of parameters, the optimizer {len(first.weights)}",
            where=first.where,
            hint=MIXED,
        )
    gaps = first.said.get("param_alignment_paddings")
    found: dict[str, _Parameter] = {}
    for row, names in enumerate(shapes):
        lengths = [piece.lengths[row] for piece in pieces]
        last = max((rank for rank, length in enumerate(lengths) if length), default=0)
        if len({*lengths[:last]} | {max(lengths)}) > 1:
            raise FormatError(
                f"the pieces of group {row} are not of one length",
                where=first.where,
                value=lengths[:16],
                hint=MIXED,
            )
        starts = [0, *accumulate(lengths)]
        between = gaps[row] if isinstance(gaps, list) and row < len(gaps) else [0] * len(names)
        between = document.integers(between, f"{first.where}: param_alignment_paddings")
        if len(between) != len(names):
            raise FormatError("not one padding for each parameter", where=first.where, value=row)
        at = 0
        for (name, shape), gap in zip(names.items(), between, strict=True):
            stop = at + math.prod(shape)
            runs = tuple(
                _Run(
                    rank, row, max(at, low) - low, max(at, low) - at, min(stop, high) - max(at, low)
                )
                for rank, (low, high) in enumerate(pairwise(starts))
                if max(at, low) < min(stop, high)
            )
            found[name] = _Parameter(shape, runs, row)
            at = stop + gap
        # The rows are aligned to two elements for each rank.
        if not 0 <= starts[-1] - at < 2 * len(pieces):
            raise _other_count(row, at, starts[-1], first.where)
    return found


def _by_parameters(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], pieces: Sequence[_Piece]
) -> dict[str, _Parameter]:
    """Where the elements of each parameter are, as stage 3 cuts: its part of a rank may begin in
    one row and end in the next.
    """
    lengths = pieces[0].lengths
    for piece in pieces[1:]:
        if piece.lengths != lengths:
            raise FormatError(
                "its pieces are not as long as those of rank 0",
                where=piece.where,
                value=piece.lengths[:16],
                hint=MIXED,
            )
    starts = [0, *accumulate(lengths)]
    found: dict[str, _Parameter] = {}
    at = row = 0
    for names in shapes:
        for name, shape in names.items():
            numel = math.prod(shape)
            part = -(-numel // len(pieces))
            while row < len(lengths) and starts[row + 1] <= at:
                row += 1
            runs = tuple(
                run
                for rank in range(len(pieces))
                for run in _crossing(
                    rank, rank * part, at, min(part, numel - rank * part), row, starts
                )
            )
            found[name] = _Parameter(shape, runs, row)
            at += part
    if at != starts[-1]:
        raise _other_count(None, at, starts[-1], pieces[0].where)
    return found


def _crossing(
    rank: int, begin: int, at: int, count: int, row: int, starts: Sequence[int]
) -> Iterator[_Run]:
    """The runs of so many elements of a rank's rows, from `at` on."""
    while count > 0 and row + 1 < len(starts):
        some = min(count, starts[row + 1] - at)
        if some:
            yield _Run(rank, row, at - starts[row], begin, some)
        at, begin, count, row = at + some, begin + some, count - some, row + 1


def _paddings(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], pieces: Sequence[_Piece]
) -> list[list[tuple[int, int, int]]]:
    """Of each rank where it has nothing of a parameter, as stage 3 cuts: (row, start, count)."""
    lengths = pieces[0].lengths
    starts = [0, *accumulate(lengths)]
    found: list[list[tuple[int, int, int]]] = [[] for _ in pieces]
    at = row = 0
    for numel in (math.prod(shape) for names in shapes for shape in names.values()):
        part = -(-numel // len(pieces))
        while row < len(lengths) and starts[row + 1] <= at:
            row += 1
        for rank, mine in enumerate(found):
            count = min(part, max(0, (rank + 1) * part - numel))
            runs = _crossing(rank, 0, at + part - count, count, row, starts)
            mine.extend((run.row, run.start, run.count) for run in runs)
        at += part
    return found


def _other_count(row: int | None, wanted: int, there: int, where: str) -> FormatError:
    return FormatError(
        f"by param_shapes {'a piece' if row is None else f'group {row}'} has {wanted} elements",
        where=where,
        value=there,
        hint="the file is of another save, or of another model; copy the folder again",
    )


def _check_fragments(parameters: Mapping[str, _Parameter], pieces: Sequence[_Piece]) -> None:
    """Refuse ranks whose own list of what they have says something else."""
    for rank, piece in enumerate(pieces):
        told = piece.said.get("param_slice_mappings")
        for row, names in enumerate(told if isinstance(told, list) else ()):
            mine = {
                name: (run.start, run.count)
                for name, parameter in parameters.items()
                for run in parameter.runs
                if (run.rank, run.row) == (rank, row)
            }
            said = {
                name: (at.fields().get("start"), at.fields().get("numel"))
                for name, at in (names.items() if isinstance(names, dict) else ())
                if isinstance(at, Placeholder)
            }
            if said != mine:
                wrong = next(n for n in (*mine, *said) if mine.get(n) != said.get(n))
                raise FormatError(
                    f"the file says that {wrong} is at {said.get(wrong)} (start, count), by "
                    f"param_shapes it is at {mine.get(wrong)}",
                    where=piece.where,
                    hint="the file is of another save, or of another model; copy the folder again",
                )


def _states(row: int, pieces: Sequence[_Piece], left_out: dict[str, str]) -> dict[str, Any]:
    """The states of a row: those that are cut as it is by rank, others as they are."""
    by_rank = [piece.states[row] for piece in pieces]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in by_rank for key in state):
        values = [state.get(key) for state in by_rank]
        name = f"optimizer/{row}/{key}"
        fits = [_fits(value, piece, row) for value, piece in zip(values, pieces, strict=True)]
        if any(fits):
            if not all(fits):
                raise FormatError(
                    f"the pieces of {key} are not as long as those of the weights",
                    where=pieces[fits.index(False)].where,
                    hint=MIXED,
                )
            found[key] = _ByRank(values)
        elif any(isinstance(value, StateTensor) and value.shape for value in values):
            left_out[name] = "a state that is not cut as the parameters are"
        elif len({_scalar(value) for value in values}) > 1:
            rank = next(n for n, v in enumerate(values) if _scalar(v) != _scalar(values[0]))
            raise FormatError(
                f"its {key} is not that of rank 0", where=pieces[rank].where, hint=MIXED
            )
        else:
            found[key] = values[0]
    return found


def _fits(value: Any, piece: _Piece, row: int) -> bool:
    """Whether a state is a row as long as that of the weights, of which the padding may be cut."""
    if not _is_row(value):
        return False
    paddings = piece.said.get("group_paddings")
    padding = paddings[row] if isinstance(paddings, list) and row < len(paddings) else 0
    length = piece.lengths[row]
    return value.shape[0] in (length, length + document.integer(padding, piece.where))


def _scalar(value: Any) -> object:
    """Equal for scalars that are: of those in files as their checksums tell."""
    return value.content if isinstance(value, StateTensor) else repr(value)


def _plain(groups: Sequence[Mapping[str, Any]]) -> str:
    return repr(
        [{k: v for k, v in each.items() if not isinstance(v, StateTensor)} for each in groups]
    )


def _tensor(
    name: str,
    parameter: _Parameter,
    ranks: Sequence[Sequence[Any]],
    where: str | Sequence[_Piece],
) -> StateTensor:
    """A parameter, or a state of it, of the rows of all ranks."""
    extents = []
    dtypes = {}
    for run in parameter.runs:
        tensor = ranks[run.rank][run.row]
        place = where if isinstance(where, str) else where[run.rank].where
        if not isinstance(tensor, StateTensor):
            raise FormatError(f"a part of {name} is missing", where=place, hint=MIXED)
        dtypes[tensor.dtype.name] = tensor.dtype
        if len(dtypes) > 1:
            raise FormatError(
                f"the parts of {name} are of several types", where=place, value=sorted(dtypes)
            )
        extent = tensor.extents[0]
        begin = extent.offset + run.start * tensor.dtype.itemsize
        extents.append(replace(extent, box=Box((run.begin,), (run.count,)), offset=begin))
    if not dtypes:  # it has no elements
        dtypes = {row.dtype.name: row.dtype for row in ranks[0][:1]}
    (dtype,) = dtypes.values()
    return StateTensor(parameter.shape, dtype, tuple(extents), identity=object(), is_flat=True)
