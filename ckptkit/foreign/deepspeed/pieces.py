"""What the optimizer's file of each rank says: of each row of parameters a piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.experts import SharedExperts
from ckptkit.foreign.deepspeed.files import MIXED, ModelPart
from ckptkit.foreign.states import StateTensor
from ckptkit.model import document


@dataclass(slots=True)
class RankPieces:
    """What the optimizer's file of one rank says: of each row its piece."""

    where: str
    said: Mapping[str, Any]
    teams: Sequence[Sequence[range]] = ()
    """The ranks that have cut each row among them."""
    weights: list[StateTensor] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    def teams_of(self, shapes: int, world: int) -> Sequence[range]:
        """Who has cut what is told with so many others before it: mostly all ranks."""
        return self.teams[min(shapes, len(self.teams) - 1)] if self.teams else (range(world),)


class ByRank(list[Any]):
    """Each rank's piece of a state."""


def read_piece(where: str, said: Any, part: ModelPart, experts: SharedExperts) -> RankPieces:
    """What one rank's file says, its shape checked."""
    if not isinstance(said, dict):
        raise FormatError("no optimizer is in the file", where=where)
    rows = said.get("fp32_flat_groups" if part.stage == 3 else "single_partition_of_fp32_groups")
    inner = said.get("optimizer_state_dict" if part.stage == 3 else "base_optimizer_state")
    if not isinstance(rows, (list, tuple)):
        raise FormatError("the file has no master weights", where=where, hint=MIXED)
    piece = RankPieces(where, said)
    for row, weight in enumerate(rows):
        if not _is_row(weight):
            raise FormatError(
                "a group of weights that is no row of numbers", where=where, value=row
            )
        piece.weights.append(weight)
    piece.teams = [
        experts.teams(count, len(part.optimizers))
        for count in counts_of(said, len(rows), len(part.optimizers), where)
    ]
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


def counts_of(said: Mapping[str, Any], rows: int, world: int, where: str) -> list[int]:
    """How many ranks have cut each row."""
    told = said.get("partition_count", world)
    told = list(told) if isinstance(told, (list, tuple)) else [told] * rows
    if isinstance(parts := said.get("ds_zero_partition_groups"), list):
        told = [part.get("partition_count") if isinstance(part, dict) else None for part in parts]
    if len(told) != rows or any(
        type(count) is not int or count < 1 or world % count for count in told
    ):
        raise FormatError(
            f"its groups are cut for {sorted(set(map(str, told)))} ranks, there are the files of "
            f"{world}",
            where=where,
            hint="files of other ranks are missing or too many; shards in groups of ranks (MiCS) "
            "are not read here",
        )
    return told


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, StateTensor)
        and len(value.shape) == 1
        and value.extents[0].strides is None
    )


def states_of_row(
    row: int, pieces: Sequence[RankPieces], left_out: dict[str, str]
) -> dict[str, Any]:
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
            found[key] = ByRank(values)
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


def _fits(value: Any, piece: RankPieces, row: int) -> bool:
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


def text_of(groups: Sequence[Mapping[str, Any]]) -> str:
    return repr(
        [{k: v for k, v in each.items() if not isinstance(v, StateTensor)} for each in groups]
    )
