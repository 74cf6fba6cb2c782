"""Optimizers of FSDP1 models: what they keep for a flat parameter, as rows of the original ones.

torch's own `FSDP.optim_state_dict`, which `torch.distributed.checkpoint.state_dict` calls too,
refuses an optimizer that has only some parameters of a flat one, or has no state yet for some; so
state is cut and put together here, in the same two ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.state.tensors import local_of, parts_of_tensor
from ckptkit.live.state.trees import take_tensors
from ckptkit.live.wrappers.entries import Names, Saved, SavedState, StateEntry, StateMismatchError
from ckptkit.live.wrappers.flat import Flat, FlatSlice, flats_of
from ckptkit.live.wrappers.optimizers import PlainOptimizer, step_without_effect


@dataclass(frozen=True, slots=True)
class _KeptValue:
    """What is kept under one key for one parameter: elements of this dtype, or one value."""

    dtype: torch.dtype | None = None
    value: Any = None


_KeptByName = dict[str, dict[str, _KeptValue]]


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """The pieces of a flat parameter that an optimizer has, by what it has them as."""

    flat: Flat
    pieces: Mapping[nn.Parameter, tuple[FlatSlice, ...]]

    @property
    def names(self) -> list[str]:
        """The names of all pieces."""
        return [piece.name for pieces in self.pieces.values() for piece in pieces]

    def holders(self) -> Iterator[tuple[nn.Parameter, tuple[FlatSlice, ...]]]:
        """What has elements on this rank; for what has none, optimizers keep nothing."""
        for parameter, pieces in self.pieces.items():
            if not self.flat.keeps_originals or pieces[0].count:
                yield parameter, pieces

    def elements(self, piece: FlatSlice, value: torch.Tensor) -> torch.Tensor:
        """The elements of a piece, in the tensor that is kept for its holder."""
        if self.flat.keeps_originals:
            return value.view(-1)
        return value[piece.at : piece.at + piece.count]


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """What an optimizer has on this rank of one parameter that lies in a flat one."""

    adapter: FSDP1Optimizer
    share: _Share
    holder: nn.Parameter
    """What the optimizer steps: the flat parameter, or the view that stands for this one."""
    piece: FlatSlice

    @property
    def is_alone(self) -> bool:
        """Whether nothing else has its state with that of this parameter."""
        return self.share.flat.keeps_originals or len(self.share.pieces[self.holder]) == 1

    @property
    def is_here(self) -> bool:
        """Whether its state, or that of the flat one that it is in, is this rank's to keep."""
        return not self.share.flat.keeps_originals or self.piece.count > 0

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Its elements in a tensor that is kept for the holder; a single value as it is."""
        return self.share.elements(self.piece, value) if value.ndim else value


class FSDP1Optimizer(PlainOptimizer):
    """An optimizer of parameters that FSDP1 made flat, and perhaps of others."""

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        super().__init__(optimizer)
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        self._names: dict[nn.Parameter, list[str]] = {}
        self._shares: list[_Share] = []
        self._whole: dict[nn.Parameter, str] = {}
        self._saved: SavedState | None = None
        self.copied: MutableMapping[nn.Parameter, dict[str, Any]] | None = None
        """What counts as the optimizer's state instead of its own."""
        for flat in (flat for module in modules for flat in flats_of(module)):
            held = {p: pieces for p, pieces in _pieces_by_holder(flat).items() if p in mine}
            self._names |= {p: [piece.name for piece in held[p]] for p in held}
            if flat.group is None and flat.keeps_originals:
                self._whole |= {p: pieces[0].name for p, pieces in held.items()}
            elif held:
                self._shares.append(_Share(flat, held))

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """What it keeps, by the parameters that it steps."""
        return super().state if self.copied is None else self.copied

    @property
    def held(self) -> dict[str, FlatPart]:
        """By every name of a parameter that lies in a flat one, what this rank has of it."""
        return {
            name: FlatPart(self, share, parameter, piece)
            for share in self._shares
            for parameter, pieces in share.pieces.items()
            for piece in pieces
            for name in (piece.name, *piece.also)
        }

    def rows(self, part: FlatPart) -> list[StateEntry]:
        """Copies of this rank's rows of what is kept for one parameter. A collective."""
        (kept,) = self._kept([part.share])
        name = part.piece.name
        return self._entries_of(part.share, {name: kept.get(name, {})})

    def take(self, part: FlatPart, entries: Sequence[StateEntry], values: dict[str, Any]) -> None:
        """Take over the rows, filled, and the values of one parameter. A collective."""
        whole = {e.key: e.value for e in entries if e.shape is None}
        self._absorb_rows(part.share, [e for e in entries if e.shape is not None])
        self._absorb_values(part.share, {part.piece.name: whole | values})

    def names_of(self, names: Names, parameters: Sequence[nn.Parameter]) -> list[str]:
        """The names of parameters; a flat one has those of all that it is made of."""
        found = []
        for parameter in parameters:
            found += self._names.get(parameter) or super().names_of(names, [parameter])
        return found

    def entries(self, names: Names) -> list[StateEntry]:
        """Copies of this rank's rows of what is kept. A collective."""
        found = super().entries({**names, **self._whole})
        for share, kept in zip(self._shares, self._kept(self._shares), strict=True):
            found += self._entries_of(share, kept)
        return found

    def prepare(self, names: Names, saved: SavedState) -> None:
        """Make the state of all that has some in the checkpoint."""
        super().prepare({**names, **self._whole}, saved)
        self._saved = saved
        for share in self._shares:
            for parameter, pieces in share.holders():
                if not any(piece.name in saved for piece in pieces):
                    continue  # what the step does not have stays as it is
                kept = {p.name: saved[p.name] for p in pieces if saved.get(p.name)}
                self._make_room(share, parameter, len(pieces), kept)

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over rows, values and options. A collective."""
        super().absorb({**names, **self._whole}, entries, values, options)
        for share in self._shares:
            own = set(share.names)
            mine = [entry for entry in entries if entry.parameter in own]
            self._absorb_rows(share, [e for e in mine if e.shape is not None])
            given: dict[str, dict[str, Any]] = {}
            for entry in mine:
                if entry.shape is None and self._was_saved(entry):
                    given.setdefault(entry.parameter, {})[entry.key] = entry.value
            for name in own:
                given.setdefault(name, {}).update(values.get(name, {}))
            self._absorb_values(share, given)

    def _parameters(self) -> list[nn.Parameter]:
        shared = {p for share in self._shares for p in share.pieces}
        return [p for p in super()._parameters() if p not in shared]

    def _kept(self, shares: Sequence[_Share]) -> list[_KeptByName]:
        """What all ranks keep, for each share: with the original parameters, ranks that have no
        elements of one know nothing of its state.
        """
        found = [self._kept_here(share) for share in shares]
        groups: dict[dist.ProcessGroup, list[int]] = {}
        for number, share in enumerate(shares):
            if share.flat.keeps_originals and share.flat.group is not None:
                groups.setdefault(share.flat.group, []).append(number)
        for group, numbers in groups.items():
            heard: list[list[_KeptByName]] = [[] for _ in range(group.size())]
            dist.all_gather_object(heard, [found[number] for number in numbers], group=group)
            for number, *of_ranks in zip(numbers, *heard, strict=True):
                found[number] = _merged(of_ranks)
        return found

    def _kept_here(self, share: _Share) -> _KeptByName:
        found: _KeptByName = {}
        for parameter, pieces in share.holders():
            size = pieces[0].count if share.flat.keeps_originals else share.flat.shard_size
            for key, value in self.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    if take_tensors(value, key)[1]:
                        raise _in_a_container(pieces[0].name, key)
                    kept = _KeptValue(value=value)
                elif parts_of_tensor(value):
                    raise _in_a_container(pieces[0].name, key)
                elif value.ndim == 0:
                    kept = _KeptValue(value=value.detach().to("cpu", copy=True))
                elif value.shape == (size,):
                    kept = _KeptValue(dtype=value.dtype)
                else:
                    raise _not_of_its_shape(pieces[0].name, key, tuple(value.shape))
                for piece in pieces:
                    found.setdefault(piece.name, {})[key] = kept
        return found

    def _entries_of(self, share: _Share, kept: _KeptByName) -> list[StateEntry]:
        found = []
        sorts: dict[tuple[str, torch.dtype], list[str]] = {}
        for name, by_key in kept.items():
            for key, item in by_key.items():
                if item.dtype is not None:
                    sorts.setdefault((key, item.dtype), []).append(name)
                else:
                    value = item.value.clone() if torch.is_tensor(item.value) else item.value
                    found.append(StateEntry(name, key, value))
        known = {p.name: p for pieces in share.pieces.values() for p in pieces}
        for (key, dtype), names in sorts.items():
            here = {
                piece.name: share.elements(piece, self.state[parameter][key])
                for parameter, pieces in share.holders()
                for piece in pieces
                if piece.name in names
            }
            rows = share.flat.rows(names, here, dtype)
            found += [
                StateEntry(name, key, *share.flat.described(known[name], rows[name]))
                for name in names
            ]
        return found

    def _make_room(
        self,
        share: _Share,
        parameter: nn.Parameter,
        pieces: int,
        saved: SavedState,
    ) -> None:
        for name, kept in saved.items():
            for key, item in kept.items():
                if not isinstance(item, Saved) or item.is_wrapper:
                    raise _in_a_container(name, key)
                if item.shape and not item.is_like_parameter:
                    raise _not_of_its_shape(name, key, item.shape)
        wanted = {key: item for kept in saved.values() for key, item in kept.items()}
        state = self.state.get(parameter, {})
        parts = [kept for kept in saved.values() if kept.keys() == wanted.keys()]
        if wanted and len(parts) < pieces and not wanted.keys() <= state.keys():
            # What has no saved state shares the tensors of what has: it begins as the optimizer
            # would have it begin.
            step_without_effect(self._optimizer, [parameter])
            state = self.state[parameter]
        for key in [k for k, v in state.items() if torch.is_tensor(v) and k not in wanted]:
            del state[key]
        for key, item in wanted.items():
            if not torch.is_tensor(state.get(key)):
                self.state[parameter][key] = self._zeros(share, parameter, item)
        if not wanted and not state:
            self.state.pop(parameter, None)

    def _zeros(self, share: _Share, parameter: nn.Parameter, item: Saved) -> torch.Tensor:
        if not item.shape:
            return self._empty(parameter, item).zero_()
        flat = share.flat
        held = next(pieces for p, pieces in share.pieces.items() if p is parameter)
        size = held[0].count if flat.keeps_originals else flat.shard_size
        return torch.zeros(size, dtype=item.dtype, device=parameter.device)

    def _was_saved(self, entry: StateEntry) -> bool:
        return self._saved is None or entry.key in self._saved.get(entry.parameter, {})

    def _absorb_rows(self, share: _Share, entries: Sequence[StateEntry]) -> None:
        sorts: dict[tuple[str, torch.dtype], dict[str, torch.Tensor]] = {}
        for entry in entries:
            own_rows = local_of(entry.value)
            sorts.setdefault((entry.key, own_rows.dtype), {})[entry.parameter] = own_rows
        for (key, _), rows in sorts.items():
            elements = share.flat.elements(rows)
            for parameter, pieces in share.holders():
                for piece in pieces:
                    if piece.name in elements:
                        own = share.elements(piece, self.state[parameter][key])
                        own.copy_(elements[piece.name])

    def _absorb_values(self, share: _Share, given: Mapping[str, Mapping[str, Any]]) -> None:
        for parameter, pieces in share.holders():
            known: dict[str, Any] = {}
            for piece in pieces:
                for key, value in given.get(piece.name, {}).items():
                    if not _same(known.setdefault(key, value), value):
                        raise StateMismatchError(
                            f"{pieces[0].name} and {piece.name} are one flat parameter here, but "
                            f"were saved with different values of {key}",
                            where=f"optimizer/{piece.name}/{key}",
                            value=(known[key], value),
                            hint="FSDP with use_orig_params=True keeps them apart",
                        )
            for key, value in known.items():
                if torch.is_tensor(value):
                    self.state[parameter][key].copy_(value)
                else:
                    self.state[parameter][key] = value


def _pieces_by_holder(flat: Flat) -> dict[nn.Parameter, tuple[FlatSlice, ...]]:
    if not flat.keeps_originals:
        return {flat.parameter: flat.pieces}
    return {piece.parameter: (piece,) for piece in flat.pieces if piece.parameter is not None}


def _merged(of_ranks: Sequence[_KeptByName]) -> _KeptByName:
    """What the first rank that has it says of each value."""
    found: _KeptByName = {}
    for kept in of_ranks:
        for name, by_key in kept.items():
            known = found.setdefault(name, {})
            for key, item in by_key.items():
                known.setdefault(key, item)
    return found


def _same(one: object, other: object) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return bool(torch.equal(one, other))
    return bool(one == other)


def _in_a_container(name: str, key: str) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        "a container with tensors, or a tensor made of others: no flat parameter has such",
        where=f"optimizer/{name}/{key}",
        hint="fully_shard (FSDP2) keeps parameters apart",
    )


def _not_of_its_shape(name: str, key: str, shape: tuple[int, ...]) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        "this value has not the shape of its parameter, and FSDP1 would cut it anyhow",
        where=f"optimizer/{name}/{key}",
        value=shape,
        hint="fully_shard (FSDP2) keeps the shapes of parameters",
    )
