"""Optimizers of FSDP1 models: what they keep for a flat parameter, as rows of the original ones.

torch's own `FSDP.optim_state_dict`, which `torch.distributed.checkpoint.state_dict` calls too,
refuses an optimizer that has only some parameters of a flat one, or has no state yet for some; so
state is cut and put together here, in the same two ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.state.tensors import dtype_name, local_of, parts_of_tensor
from ckptkit.live.state.trees import no_tensor, put_tensors, take_tensors, tensors_inline
from ckptkit.live.wrappers.entries import Names, Saved, SavedState, StateEntry, StateMismatchError
from ckptkit.live.wrappers.flat import Flat, FlatSlice, flats_of, told_to_all
from ckptkit.live.wrappers.optimizers import PlainOptimizer, step_without_effect

_KeptByName = dict[str, dict[str, list[Any]]]
"""By parameter and key the name of the dtype of the elements that are kept there, or none and one
value: what a rank tells the others."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """What an optimizer has on this rank of one parameter that lies in a flat one."""

    adapter: FSDP1Optimizer
    flat: Flat
    piece: FlatSlice

    @property
    def name(self) -> str:
        """The first, where it has several."""
        return self.piece.name

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer steps: a view of it, or the flat one that it is in."""
        return self.piece.holder

    @property
    def is_alone(self) -> bool:
        """Whether nothing else has its state with that of this parameter."""
        return self.piece.is_view or len(self.flat.slices) == 1

    @property
    def is_here(self) -> bool:
        """Whether its state, or that of the flat one that it is in, is this rank's to keep."""
        return not self.piece.is_view or self.piece.count > 0

    def elements(self, value: torch.Tensor) -> torch.Tensor:
        """Its own in what is kept for the flat one."""
        return self.piece.within(value) if value.ndim else value

    def entries(self) -> list[StateEntry]:
        """Copies of this rank's rows of what is kept. A collective."""
        (kept,) = self.adapter._kept([self.flat])
        return self.adapter._entries_of(self.flat, {self.name: kept.get(self.name, {})})

    def take(self, entries: Sequence[StateEntry], values: dict[str, Any]) -> None:
        """Take over the rows, filled, and the values. A collective."""
        whole = {e.key: e.value for e in entries if not _is_rows(e)}
        self.adapter._absorb_rows(self.flat, list(filter(_is_rows, entries)))
        self.adapter._absorb_values(self.flat, {self.name: whole | values})


class FSDP1Optimizer(PlainOptimizer):
    """An optimizer of parameters that FSDP1 made flat, and perhaps of others."""

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        super().__init__(optimizer)
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        self._names: dict[nn.Parameter, list[str]] = {}
        self._flats: list[Flat] = []
        self._whole: dict[nn.Parameter, str] = {}
        self._saved: SavedState | None = None
        for flat in (flat for module in modules for flat in flats_of(module)):
            held = tuple(piece for piece in flat.slices if piece.holder in mine)
            for piece in held:
                self._names.setdefault(piece.holder, []).append(piece.name)
            if flat.group is None and flat.keeps_originals:
                self._whole |= {piece.holder: piece.name for piece in held}
            elif held:
                self._flats.append(replace(flat, slices=held))

    @property
    def held(self) -> dict[str, FlatPart]:
        """By every name of a parameter that lies in a flat one, what this rank has of it."""
        return {
            name: FlatPart(self, flat, piece)
            for flat in self._flats
            for piece in flat.slices
            for name in (piece.name, *piece.also)
        }

    def names_of(self, names: Names, parameters: Sequence[nn.Parameter]) -> list[str]:
        """The names of parameters; a flat one has those of all that it is made of."""
        found = []
        for parameter in parameters:
            found += self._names.get(parameter) or super().names_of(names, [parameter])
        return found

    def entries(self, names: Names) -> list[StateEntry]:
        """Copies of this rank's rows of what is kept. A collective."""
        found = super().entries({**names, **self._whole})
        for flat, kept in zip(self._flats, self._kept(self._flats), strict=True):
            found += self._entries_of(flat, kept)
        return found

    def prepare(self, names: Names, saved: SavedState) -> None:
        super().prepare({**names, **self._whole}, saved)
        self._saved = saved
        for flat in self._flats:
            for parameter, pieces in flat.holders().items():
                if not any(piece.name in saved for piece in pieces):
                    continue  # what the step does not have stays as it is
                kept = {p.name: saved[p.name] for p in pieces if saved.get(p.name)}
                self._make_room(flat, parameter, pieces, kept)

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over rows, values and options. A collective."""
        super().absorb({**names, **self._whole}, entries, values, options)
        for flat in self._flats:
            own = {piece.name for piece in flat.slices}
            mine = [entry for entry in entries if entry.parameter in own]
            self._absorb_rows(flat, list(filter(_is_rows, mine)))
            given: dict[str, dict[str, Any]] = {}
            for entry in mine:
                kept = None if self._saved is None else self._saved.get(entry.parameter, {})
                # What the step does not have keeps the value that is here.
                if not _is_rows(entry) and (kept is None or entry.key in kept):
                    given.setdefault(entry.parameter, {})[entry.key] = entry.value
            for name in own:
                given.setdefault(name, {}).update(values.get(name, {}))
            self._absorb_values(flat, given)

    def _parameters(self) -> list[nn.Parameter]:
        shared = {piece.holder for flat in self._flats for piece in flat.slices}
        return [p for p in super()._parameters() if p not in shared]

    def _kept(self, flats: Sequence[Flat]) -> list[_KeptByName]:
        """What all ranks keep, for each flat parameter: with the original parameters, ranks that
        have no elements of one know nothing of its state.
        """
        found: list[_KeptByName] = []
        groups: dict[dist.ProcessGroup, list[int]] = {}
        for number, flat in enumerate(flats):
            found.append(self._kept_here(flat))
            if flat.keeps_originals and flat.group is not None:
                groups.setdefault(flat.group, []).append(number)
        for group, numbers in groups.items():
            mine = [tensors_inline(found[number]) for number in numbers]
            heard = told_to_all(mine, group, flats[numbers[0]].device)
            for number, *of_ranks in zip(numbers, *heard, strict=True):
                together: _KeptByName = {}
                for kept in of_ranks:  # of each value what the first rank says that has it
                    for name, by_key in put_tensors(kept, no_tensor, "a rank").items():
                        together[name] = by_key | together.get(name, {})
                found[number] = together
        return found

    def _kept_here(self, flat: Flat) -> _KeptByName:
        found: _KeptByName = {}
        for parameter, pieces in flat.holders().items():
            for key, value in self.state.get(parameter, {}).items():
                if not torch.is_tensor(value):
                    if take_tensors(value, key)[1]:
                        raise _in_a_container(pieces[0].name, key)
                    kept = [None, value]
                elif parts_of_tensor(value):
                    raise _in_a_container(pieces[0].name, key)
                elif value.ndim == 0:
                    kept = [None, value.detach().to("cpu", copy=True)]
                elif value.shape == (flat.kept_size(pieces[0]),):
                    kept = [dtype_name(value.dtype), None]
                else:
                    raise _not_of_its_shape(pieces[0].name, key, tuple(value.shape))
                for piece in pieces:
                    found.setdefault(piece.name, {})[key] = kept
        return found

    def _entries_of(self, flat: Flat, kept: _KeptByName) -> list[StateEntry]:
        found = []
        sorts: dict[tuple[str, str], list[str]] = {}
        for name, by_key in kept.items():
            for key, (dtype, value) in by_key.items():
                if dtype is not None:
                    sorts.setdefault((key, dtype), []).append(name)
                else:
                    own = value.clone() if torch.is_tensor(value) else value
                    found.append(StateEntry(name, key, own))
        known = {piece.name: piece for piece in flat.slices}
        for (key, dtype), names in sorts.items():
            here = {
                piece.name: piece.within(self.state[parameter][key])
                for parameter, pieces in flat.holders().items()
                for piece in pieces
                if piece.name in names
            }
            rows = flat.rows(names, here, getattr(torch, dtype))
            found += [StateEntry(n, key, *flat.described(known[n], rows[n])) for n in names]
        return found

    def _make_room(
        self,
        flat: Flat,
        parameter: nn.Parameter,
        pieces: Sequence[FlatSlice],
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
        if wanted and len(parts) < len(pieces) and not wanted.keys() <= state.keys():
            # What has no saved state shares the tensors of what has: it begins as the optimizer
            # would have it begin.
            step_without_effect(self._optimizer, [parameter])
            state = self.state[parameter]
        for key in [k for k, v in state.items() if torch.is_tensor(v) and k not in wanted]:
            del state[key]
        for key, item in wanted.items():
            if not torch.is_tensor(state.get(key)):
                if item.shape:
                    size, device = flat.kept_size(pieces[0]), parameter.device
                    made = torch.zeros(size, dtype=item.dtype, device=device)
                else:
                    made = self._empty(parameter, item).zero_()
                self.state[parameter][key] = made
        if not wanted and not state:
            self.state.pop(parameter, None)

    def _absorb_rows(self, flat: Flat, entries: Sequence[StateEntry]) -> None:
        sorts: dict[tuple[str, torch.dtype], dict[str, torch.Tensor]] = {}
        for entry in entries:
            own_rows = local_of(entry.value)
            sorts.setdefault((entry.key, own_rows.dtype), {})[entry.parameter] = own_rows
        for (key, _), rows in sorts.items():
            elements = flat.elements(rows)
            for parameter, pieces in flat.holders().items():
                for piece in pieces:
                    if piece.name in elements:
                        own = piece.within(self.state[parameter][key])
                        own.copy_(elements[piece.name])

    def _absorb_values(self, flat: Flat, given: Mapping[str, Mapping[str, Any]]) -> None:
        for parameter, pieces in flat.holders().items():
            known: dict[str, Any] = {}
            for piece in pieces:
                for key, value in given.get(piece.name, {}).items():
                    first = known.setdefault(key, value)
                    both = torch.is_tensor(first) and torch.is_tensor(value)
                    if not (torch.equal(first, value) if both else bool(first == value)):
                        raise StateMismatchError(
                            f"{pieces[0].name} and {piece.name} are one flat parameter here, but "
                            f"were saved with different values of {key}",
                            where=f"optimizer/{piece.name}/{key}",
                            value=(first, value),
                            hint="FSDP with use_orig_params=True keeps them apart",
                        )
            for key, value in known.items():
                if torch.is_tensor(value):
                    self.state[parameter][key].copy_(value)
                else:
                    self.state[parameter][key] = value


def _is_rows(entry: StateEntry) -> bool:
    """Whether it has elements of a parameter, and is not one value for all of it."""
    return torch.is_tensor(entry.value) and entry.value.ndim > 0


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
