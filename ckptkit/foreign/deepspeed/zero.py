"""What ZeRO has cut: groups of parameters as one long row each, of which every rank has a piece.

Nothing in a piece says whose elements it holds. `param_shapes` of the model's file has the names
and shapes in the order of the rows. Stages 1 and 2 cut each row into equal pieces, wherever that
falls; stage 3 cuts each parameter for itself, and a rank's pieces lie one after the other.

A row of experts is of some ranks only, a team: others have such a row of experts of their own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.experts import SharedExperts
from ckptkit.foreign.deepspeed.files import (
    MIXED,
    ByRank,
    ModelPart,
    RankPieces,
    as_dict,
    counts_of,
    read_piece,
    states_of_row,
)
from ckptkit.foreign.extents import Stretches, samples
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box, document

# So many of the paddings of a rank are looked at.
_PADDINGS = 64


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
    part: ModelPart,
    experts: SharedExperts,
) -> Zero:
    """What is in the optimizer's files of all ranks of data parallelism."""
    places, stage = [where for where, _ in part.optimizers], part.stage
    pieces = [read_piece(where, said, part, experts.teams) for where, said in part.optimizers]
    for piece in pieces[1:]:
        if len(piece.weights) != len(pieces[0].weights):
            raise FormatError(
                f"rank 0 has {len(pieces[0].weights)} groups, this one {len(piece.weights)}",
                where=piece.where,
                hint=MIXED,
            )
        kinds = [[group.get("name") for group in each.groups] for each in (piece, pieces[0])]
        if kinds[0] != kinds[1] and set(map(repr, kinds[0])) == set(map(repr, kinds[1])):
            raise FormatError(
                "its groups of experts are in another order than those of rank 0",
                where=piece.where,
                value=kinds[0],
                hint="so DeepSpeed does by chance where layers have several `ep_size`: save again "
                "in a job with PYTHONHASHSEED=0",
            )
        options = [
            [{k: v for k, v in it.items() if not isinstance(v, StateTensor)} for it in each.groups]
            for each in (piece, pieces[0])
        ]
        if repr(options[0]) != repr(options[1]):
            raise FormatError(
                "its options of the optimizer are not those of rank 0",
                where=piece.where,
                hint=MIXED,
            )
    found = Zero()
    if isinstance(scaler := pieces[0].said.get("loss_scaler"), Placeholder):
        found.scaler = scaler.fields()
    paddings: list[list[tuple[int, int, int]]] = []
    if stage == 3:
        parameters, paddings = _by_parameters(shapes, pieces, experts)
    else:
        parameters = _by_rows(shapes, pieces, experts, reordered=part.reordered)
    rows = [states_of_row(row, pieces, found.left_out) for row in range(len(pieces[0].weights))]
    keys = dict.fromkeys(key for row in rows for key in row if type(row[key]) is ByRank)
    # Of each state, by rank, its pieces of all rows.
    cut = {
        key: [
            [row[key][rank] if type(row.get(key)) is ByRank else None for row in rows]
            for rank in range(len(pieces))
        ]
        for key in keys
    }
    if stage == 3:
        _check_paddings(folder, paddings, [*cut.values()], places)
    weights = [piece.weights for piece in pieces]
    for name, parameter in parameters.items():
        found.weights[name] = _tensor(name, parameter, weights, places)
        states = {
            key: _tensor(f"{name}/{key}", parameter, cut[key], places)
            if type(said) is ByRank
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


def groups_of(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of parameters of all stages; those with the same options are one."""
    found: dict[str, dict[str, Any]] = {}
    for number, group in ((n, group) for groups in stages for n, group in enumerate(groups)):
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
    part: ModelPart, module: Mapping[str, Any], experts: SharedExperts
) -> list[dict[str, tuple[int, ...]]]:
    """The same, where only the ranks' own lists of fragments have the names in order; the shapes
    are those of the copies in the model, where these are known.
    """
    found: list[dict[str, int]] = []
    teams: list[Sequence[range]] = []
    for rank, (where, said) in enumerate(part.optimizers):
        told = as_dict(said).get("param_slice_mappings")
        if not isinstance(told, list) or (found and len(told) != len(found)):
            raise FormatError("nothing says which parameters are where", where=where)
        if not found:
            found = [{} for _ in told]
            counts = counts_of(said, len(told), len(part.optimizers), where)
            teams = [experts.teams(count, len(part.optimizers)) for count in counts]
        for number, names in enumerate(told):
            if rank not in teams[number][0] or not isinstance(names, dict):
                continue  # other ranks have as much of other experts
            for name, at in names.items():
                fields = at.fields() if isinstance(at, Placeholder) else {}
                count = document.integer(fields.get("numel"), f"{where}: {name}")
                key = document.text(name, where)
                found[number][key] = found[number].get(key, 0) + count
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in found]
    for number, row in enumerate(found):
        for name, count in row.items():
            copy = module.get(name)
            known = copy.shape if isinstance(copy, StateTensor) else (count,)
            if name in experts.counts and known:
                known = (known[0] // len(teams[number]), *known[1:])
            if math.prod(known) != count:
                raise FormatError(
                    f"{name} of the model has the shape {known}, that of the optimizer {count} "
                    "elements",
                    where=part.where,
                    hint=MIXED,
                )
            shapes[number][name] = known
    return shapes


def frozen_of(part: ModelPart) -> dict[str, StateTensor]:
    """The parameters that the optimizer has not, where ranks have cut them: as stage 3 does, each
    has a part of its own, one after the other.
    """
    said = part.tree.get("frozen_param_shapes") if part.stage == 3 else None
    found: dict[str, StateTensor] = {}
    for name, shape in shapes_of([said or {}], part.where)[0].items():
        by_rank = [each.get("frozen_param_fragments") for each in part.models]
        told = [as_dict(each).get(name) for each in by_rank]
        pieces = [each for each in told if isinstance(each, StateTensor)]
        if len(pieces) < len(told):
            raise FormatError(f"not a part of {name} for each rank", where=part.where)
        numel = math.prod(shape)
        count = -(-numel // len(pieces))
        if any(each.shape != (count,) for each in pieces):
            raise FormatError(
                f"the parts of {name} are not {count} elements each",
                where=part.where,
                value=[each.shape for each in pieces][:8],
                hint=MIXED,
            )
        begins = enumerate(range(0, numel, max(1, count)))
        runs = tuple(_Run(rank, 0, 0, at, min(count, numel - at)) for rank, at in begins)
        places = [part.where] * len(pieces)
        found[name] = _tensor(name, _Parameter(shape, runs, 0), [[it] for it in pieces], places)
    return found


def _by_rows(
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    pieces: Sequence[RankPieces],
    experts: SharedExperts,
    *,
    reordered: bool,
) -> dict[str, _Parameter]:
    """Where the elements of each parameter are, as stages 1 and 2 cut. With `reordered` the ranks'
    own lists of fragments are of another order than the elements are.
    """
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
        between = gaps[row] if isinstance(gaps, list) and row < len(gaps) else [0] * len(names)
        between = document.integers(between, f"{first.where}: param_alignment_paddings")
        if len(between) != len(names):
            raise FormatError("not one padding for each parameter", where=first.where, value=row)
        teams = first.teams[row]
        for number, team in enumerate(teams):
            mine = _by_row(row, names, between, team, pieces)
            if not reordered:
                _check_fragments(row, mine, team, pieces)
            for name, parameter in mine.items():
                _add(found, experts, parameter, name, (number, len(teams)), first.where)
    return found


def _by_row(
    row: int,
    names: Mapping[str, tuple[int, ...]],
    gaps: Sequence[int],
    team: Sequence[int],
    pieces: Sequence[RankPieces],
) -> dict[str, _Parameter]:
    """Where the elements of the parameters of a row are that these ranks have cut."""
    where = pieces[team[0]].where
    lengths = [pieces[rank].lengths[row] for rank in team]
    last = max((at for at, length in enumerate(lengths) if length), default=0)
    if len({*lengths[:last]} | {max(lengths)}) > 1:
        raise FormatError(
            f"the pieces of group {row} are not of one length",
            where=where,
            value=lengths[:16],
            hint=MIXED,
        )
    starts = [0, *accumulate(lengths)]
    found: dict[str, _Parameter] = {}
    at = 0
    for (name, shape), gap in zip(names.items(), gaps, strict=True):
        stop = at + math.prod(shape)
        runs = tuple(
            _Run(rank, row, max(at, low) - low, max(at, low) - at, min(stop, high) - max(at, low))
            for rank, (low, high) in zip(team, pairwise(starts), strict=True)
            if max(at, low) < min(stop, high)
        )
        found[name] = _Parameter(shape, runs, row)
        at = stop + gap
    # The rows are aligned to two elements for each rank.
    if not 0 <= starts[-1] - at < 2 * len(team):
        raise _other_count(row, at, starts[-1], where)
    return found


def _add(
    found: dict[str, _Parameter],
    experts: SharedExperts,
    parameter: _Parameter,
    name: str,
    team: tuple[int, int],
    where: str,
) -> None:
    """Add what a team, of so many, has of a parameter, by its name in the whole model."""
    number, teams = team
    name = experts.named(name, number, teams, where)
    if teams > 1 and name in experts.counts:  # it is all experts of a rank, one after the other
        shape = parameter.shape
        whole = (experts.counts[name], *shape[1:])
        if not shape or shape[0] * teams != whole[0]:
            raise FormatError(
                f"{teams} times {shape} of {name} are not {whole}", where=where, hint=MIXED
            )
        begin = number * math.prod(shape)
        runs = tuple(replace(run, begin=begin + run.begin) for run in parameter.runs)
        before = found[name].runs if name in found else ()
        parameter = _Parameter(whole, (*before, *runs), parameter.row)
    found[name] = parameter


def _by_parameters(
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    pieces: Sequence[RankPieces],
    experts: SharedExperts,
) -> tuple[dict[str, _Parameter], list[list[tuple[int, int, int]]]]:
    """Where the elements of each parameter are, as stage 3 cuts: its part of a rank may begin in
    one row and end in the next. And of each rank where it has nothing of a parameter: (row, start,
    count).
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
    paddings: list[list[tuple[int, int, int]]] = [[] for _ in pieces]
    at = 0
    for number, names in enumerate(shapes):
        # Who has cut what: mostly all ranks; the last told holds for the rest.
        told = pieces[0].teams
        teams = told[min(number, len(told) - 1)] if told else (range(len(pieces)),)
        for name, shape in names.items():
            numel = math.prod(shape)
            part = -(-numel // len(teams[0]))
            for each, team in enumerate(teams):
                runs: list[_Run] = []
                for n, rank in enumerate(team):
                    count = max(0, min(part, numel - n * part))
                    runs += _crossing(rank, n * part, at, count, starts)
                    rest = _crossing(rank, 0, at + count, part - count, starts)
                    paddings[rank] += [(run.row, run.start, run.count) for run in rest]
                # One without elements may be where the last row ends.
                row = min(bisect.bisect_right(starts, at) - 1, len(starts) - 2)
                mine = _Parameter(shape, tuple(runs), row)
                _add(found, experts, mine, name, (each, len(teams)), pieces[0].where)
            at += part
        if len(teams) > 1 and at != starts[number + 1]:
            raise _other_count(number, at, starts[number + 1], pieces[0].where)
    if at != starts[-1]:
        raise _other_count(None, at, starts[-1], pieces[0].where)
    return found, paddings


def _crossing(rank: int, begin: int, at: int, count: int, starts: Sequence[int]) -> Iterator[_Run]:
    """The runs of so many elements of a rank's rows, from `at` on."""
    row = bisect.bisect_right(starts, at) - 1
    while count > 0 and row + 1 < len(starts):
        some = min(count, starts[row + 1] - at)
        if some:
            yield _Run(rank, row, at - starts[row], begin, some)
        at, begin, count, row = at + some, begin + some, count - some, row + 1


def _other_count(row: int | None, wanted: int, there: int, where: str) -> FormatError:
    return FormatError(
        f"by param_shapes {'a piece' if row is None else f'group {row}'} has {wanted} elements",
        where=where,
        value=there,
        hint="the file is of another save, or of another model; copy the folder again",
    )


def _check_fragments(
    row: int,
    parameters: Mapping[str, _Parameter],
    team: Sequence[int],
    pieces: Sequence[RankPieces],
) -> None:
    """Refuse ranks whose own list of what they have of a row says something else."""
    for rank in team:
        told = pieces[rank].said.get("param_slice_mappings")
        if not isinstance(told, list) or row >= len(told):
            continue
        mine = {
            name: (run.start, run.count)
            for name, parameter in parameters.items()
            for run in parameter.runs
            if run.rank == rank
        }
        said = {
            name: (at.fields().get("start"), at.fields().get("numel"))
            for name, at in as_dict(told[row]).items()
            if isinstance(at, Placeholder)
        }
        if said != mine:
            wrong = next(n for n in (*mine, *said) if mine.get(n) != said.get(n))
            raise FormatError(
                f"the file says that {wrong} is at {said.get(wrong)} (start, count), by "
                f"param_shapes it is at {mine.get(wrong)}",
                where=pieces[rank].where,
                hint="the file is of another save, or of another model; copy the folder again",
            )


def _tensor(
    name: str,
    parameter: _Parameter,
    ranks: Sequence[Sequence[Any]],
    places: Sequence[str],
) -> StateTensor:
    """A parameter, or a state of it, of the rows of all ranks, whose files are at `places`."""
    extents = []
    dtypes = {}
    for run in parameter.runs:
        tensor = ranks[run.rank][run.row]
        where = places[run.rank]
        if not isinstance(tensor, StateTensor):
            raise FormatError(f"a part of {name} is missing", where=where, hint=MIXED)
        dtypes[tensor.dtype.name] = tensor.dtype
        if len(dtypes) > 1:
            raise FormatError(
                f"the parts of {name} are of several types", where=where, value=sorted(dtypes)
            )
        extent = tensor.extents[0]
        begin = extent.offset + run.start * tensor.dtype.itemsize
        extents.append(replace(extent, box=Box((run.begin,), (run.count,)), offset=begin))
    if not dtypes:  # it has no elements
        dtypes = {row.dtype.name: row.dtype for row in ranks[0][:1]}
    (dtype,) = dtypes.values()
    return StateTensor(parameter.shape, dtype, tuple(extents), identity=object(), is_flat=True)


def _check_paddings(
    folder: Folder,
    paddings: Sequence[Sequence[tuple[int, int, int]]],
    states: Sequence[Sequence[Sequence[Any]]],
    files: Sequence[str],
) -> None:
    """Refuse files of ranks that have each other's names, as far as padding shows it: no gradient
    reaches that, so a state is zero there. `paddings` are told by rank as (row, start, count),
    states by rank and row.
    """

    def is_zero(rank: int, file: int) -> bool:
        rows = [
            (Stretches.of(tensor.dtype, tensor.extents), start, count)
            for row, start, count in paddings[rank][:_PADDINGS]
            for state in states
            if isinstance(tensor := state[file][row], StateTensor)
        ]
        return not any(sample.any() for sample in samples(folder, rows))

    for rank, file in enumerate(files):
        if is_zero(rank, rank):
            continue
        # With an optimizer that has something there, all files do.
        others = (n for n in range(len(files)) if n != rank and is_zero(rank, n))
        if (other := next(others, None)) is not None:
            raise FormatError(
                f"where rank {rank} has only padding there is a state, which is zero in that of "
                f"rank {other}",
                where=file,
                value=[each.rpartition("/")[2] for each in (file, files[other])],
                hint="the files have each other's names: copy the folder again",
            )
