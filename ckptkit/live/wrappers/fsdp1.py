"""FullyShardedDataParallel (FSDP1). Its models are read and loaded through their sharded state
dict; what optimizers keep for a flat parameter is cut into rows of the original ones here.

A model's rows could be cut out of its flat parameters too. But the hooks of modules, which may add
to a state dict or take from it what they make of their parameters, find these whole only while
torch itself makes the state dict.

Torch's own `FSDP.optim_state_dict`, which `torch.distributed.checkpoint.state_dict` calls too,
refuses an optimizer that has only some parameters of a flat one, or has no state yet for some.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import Failure
from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.encoding import dumps
from ckptkit.live.state.entries import (
    Line,
    ModelEntry,
    Names,
    Saved,
    SavedState,
    SharedOut,
    StateEntry,
    StateMismatchError,
    canonical_names,
    line_of,
    state_of,
)
from ckptkit.live.state.ranks import GroupRanks, World
from ckptkit.live.state.tensors import dtype_name, local_of, parts_of_tensor, spread_as
from ckptkit.live.state.trees import no_tensor, put_tensors, take_tensors, tensors_inline
from ckptkit.live.wrappers.flat import (
    Flat,
    FlatSlice,
    JoinedMeshes,
    RowExtensions,
    flats_of,
    fsdp1_units,
)
from ckptkit.live.wrappers.optimizers import PlainOptimizer, step_without_effect

_ZERO_STAGES = {
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.HYBRID_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy._HYBRID_SHARD_ZERO2: 2,
    ShardingStrategy.NO_SHARD: 0,
}


def lines(submodules: Sequence[nn.Module]) -> list[Line]:
    """The ranks over which it cuts, and those that repeat (`HYBRID_SHARD`, `NO_SHARD`)."""
    found: list[Line] = []
    for unit in fsdp1_units(submodules):
        whole = unit.sharding_strategy == ShardingStrategy.NO_SHARD
        groups = [("ddp" if whole else "fsdp", unit.process_group)]
        # Not by getattr, which goes on to the wrapped module.
        between = vars(unit).get("_inter_node_pg")
        if between is not None:
            groups.append(("ddp", between))
        mesh: Any = unit._device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        named = {mesh.get_group(dim): name for dim, name in enumerate(names)}
        found += [line_of(kind, group, named.get(group, "")) for kind, group in groups]
    return list(dict.fromkeys(found))


def details(submodules: Sequence[nn.Module]) -> dict[str, Any]:
    """How it shards, the stage of ZeRO that this is, its precision and offloading."""
    units = fsdp1_units(submodules)
    if not units:
        return {}
    mixed = [unit.mixed_precision for unit in units]
    return {
        "fsdp": {
            "sharding_strategy": _agreed(unit.sharding_strategy.name for unit in units),
            "zero_stage": _agreed(_ZERO_STAGES[unit.sharding_strategy] for unit in units),
            "units": len(units),
            "use_orig_params": _agreed(unit._use_orig_params for unit in units),
            "mixed_precision": {
                "parameters": _agreed(dtype_name(each.param_dtype) for each in mixed),
                "reduction": _agreed(dtype_name(each.reduce_dtype) for each in mixed),
                "buffers": _agreed(dtype_name(each.buffer_dtype) for each in mixed),
            },
            "cpu_offload": _agreed(unit.cpu_offload.offload_params for unit in units),
        }
    }


def _agreed(values: Iterable[Any]) -> Any:
    """The value that all have; a list of those that some have."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else distinct


def entries(submodules: Sequence[nn.Module]) -> list[ModelEntry]:
    """Copies of this rank's rows of each parameter, and the buffers. A collective."""
    module, canonical = submodules[0], canonical_names(submodules)
    pieces = [piece for flat in flats_of(module) for piece in flat.slices]
    parameters = {name for piece in pieces for name in (piece.name, *piece.also)}
    found: dict[str, ModelEntry] = {}
    with _sharded(module):
        for key, value in state_of(module).items():
            name = canonical(key)
            is_parameter = name in parameters or isinstance(value, nn.Parameter)
            if not isinstance(value, ShardedTensor):
                # FSDP keeps alike what it has flattened: with other parameters it does nothing.
                kept = name in parameters
                found[name] = ModelEntry(name, value, is_parameter, None, (key, None), kept)
                continue
            shards, shape = value.local_shards(), tuple(value.size())
            none = torch.empty((0, *shape[1:]), dtype=value.dtype)
            local = shards[0].tensor if shards else none
            ranks = dist.get_process_group_ranks(value._process_group)
            shared = SharedOut(tuple(ranks), shape)
            found[name] = ModelEntry(name, local, is_parameter, shared, (key, value))
    for piece in pieces:
        first = found.get(piece.name)
        for name in piece.also:  # the same value, loaded under both names
            if name in found and first is not None:
                source = (found[name].source[0], first.source[1])
                found[name] = first._replace(name=name, is_parameter=True, source=source)
    return list(found.values())


def absorb(submodules: Sequence[nn.Module], entries: Sequence[ModelEntry]) -> None:
    """Load what was filled. A collective."""
    module, state = submodules[0], {}
    for entry in entries:
        key, cut = entry.source
        state[key] = entry.value if cut is None else cut
    with _sharded(module):
        module.load_state_dict(state, strict=False)


@contextmanager
def _sharded(module: nn.Module) -> Iterator[None]:
    """Have state dicts sharded, in host memory: beside the model there may be no room for them."""
    config = ShardedStateDictConfig(offload_to_cpu=True)
    kind = StateDictType.SHARDED_STATE_DICT
    joined: JoinedMeshes = {}
    units = FullyShardedDataParallel.fsdp_modules(module)
    known: list[tuple[Any, Any]] = [(unit, unit._fsdp_extension) for unit in units]
    with (
        # That all of this is deprecated, and that unsharded modules give whole tensors.
        warnings.catch_warnings(action="ignore"),
        FullyShardedDataParallel.state_dict_type(module, kind, config),
    ):
        for unit, extension in known:
            # In rows, where torch would cut them otherwise or not at all.
            if extension is not None or unit._device_mesh is None:
                unit._fsdp_extension = RowExtensions(extension, unit.process_group, joined)
        try:
            yield
        finally:
            for unit, extension in known:
                unit._fsdp_extension = extension


# Optimizers of such models.

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
    def is_kept_here(self) -> bool:
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
        self.adapter._absorb_flat(self.flat, entries, {self.name: values})


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
            stepped = tuple(piece for piece in flat.slices if piece.holder in mine)
            for piece in stepped:
                self._names.setdefault(piece.holder, []).append(piece.name)
            # Where all ranks have the whole of each, it is stepped as any parameter is.
            if flat.group is None and flat.keeps_originals:
                self._whole |= {piece.holder: piece.name for piece in stepped}
            elif stepped:
                self._flats.append(replace(flat, slices=stepped))

    @property
    def flat_parts(self) -> dict[str, FlatPart]:
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
        found: list[StateEntry] = []
        problem: Exception | None = None
        try:
            found = super().entries({**names, **self._whole})
        except Exception as error:  # noqa: BLE001 — raised once the others know
            problem = error
        for flat, kept in zip(self._flats, self._kept(self._flats, problem), strict=True):
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
            self._absorb_flat(flat, [e for e in entries if e.parameter in own], values)

    def parameters(self) -> list[nn.Parameter]:
        shared = {piece.holder for flat in self._flats for piece in flat.slices}
        return [p for p in super().parameters() if p not in shared]

    def _kept(self, flats: Sequence[Flat], problem: Exception | None = None) -> list[_KeptByName]:
        """What all ranks keep, for each flat parameter: with the original parameters, ranks that
        have no elements of one know nothing of its state. With a `problem` of this rank all raise.
        """
        found: list[_KeptByName] = []
        groups: dict[dist.ProcessGroup, list[int]] = {}
        for number, flat in enumerate(flats):
            if flat.keeps_originals and flat.group is not None:
                groups.setdefault(flat.group, []).append(number)
        told: dict[int, Any] = {}
        try:
            if problem is None:
                found = [self._kept_here(flat) for flat in flats]
                told = {n: tensors_inline(found[n]) for n in chain(*groups.values())}
                dumps(list(told.values()))
        except Exception as error:  # noqa: BLE001 — raised once the others know
            problem = error
        for group, numbers in groups.items():
            # No rank can leave a collective: what goes wrong on one all raise.
            mine: object = [told.get(number) for number in numbers]
            if problem is not None:
                mine = Failure.of(dist.get_rank(), problem).said()
            # By way of the device that FSDP communicates with.
            world, device = World(group.rank(), group.size()), flats[numbers[0]].device
            heard = GroupRanks(world, group, device).agree(mine, list)
            if failures := [said for said in heard if isinstance(said, bytes)]:
                first = Failure.heard(failures[0])
                raise problem or first.error("the optimizer was not read", first.error_type)
            for number, *of_ranks in zip(numbers, *heard, strict=True):
                together: _KeptByName = {}
                for kept in of_ranks:  # of each value what the first rank says that has it
                    for name, by_key in put_tensors(kept, no_tensor, "a rank").items():
                        together[name] = by_key | together.get(name, {})
                found[number] = together
        if problem is not None:
            raise problem
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
        ranks = () if flat.group is None else tuple(dist.get_process_group_ranks(flat.group))
        for (key, dtype), names in sorts.items():
            here = {
                piece.name: piece.within(self.state[parameter][key])
                for parameter, pieces in flat.holders().items()
                for piece in pieces
                if piece.name in names
            }
            rows = flat.rows(names, here, getattr(torch, dtype))
            for name in names:
                piece = known[name]
                if piece.cut is not None:  # then the rows say themselves how they lie
                    found.append(StateEntry(name, key, spread_as(rows[name], piece.cut)))
                else:
                    shared = SharedOut(ranks, piece.shape)
                    found.append(StateEntry(name, key, rows[name], shared))
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
        complete = [kept for kept in saved.values() if kept.keys() == wanted.keys()]
        if wanted and len(complete) < len(pieces) and not wanted.keys() <= state.keys():
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
                    made = self._empty(parameter, item, key).zero_()
                self.state[parameter][key] = made
        if not wanted and not state:
            self.state.pop(parameter, None)

    def _absorb_flat(
        self,
        flat: Flat,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over what is kept for a flat parameter: rows, and by parameter the values, among
        which are entries that have one for all of it. A collective.
        """
        sorts: dict[tuple[str, torch.dtype], dict[str, torch.Tensor]] = {}
        given: dict[str, dict[str, Any]] = {}
        for entry in entries:
            kept = None if self._saved is None else self._saved.get(entry.parameter, {})
            if torch.is_tensor(entry.value) and entry.value.ndim > 0:
                rows = local_of(entry.value)
                sorts.setdefault((entry.key, rows.dtype), {})[entry.parameter] = rows
            elif kept is None or entry.key in kept:
                # What the step does not have keeps the value that is here.
                given.setdefault(entry.parameter, {})[entry.key] = entry.value
        holders = flat.holders().items()
        for (key, _), rows_by_name in sorts.items():
            elements = flat.elements(rows_by_name)
            for parameter, pieces in holders:
                for piece in pieces:
                    if piece.name in elements:
                        own = piece.within(self.state[parameter][key])
                        own.copy_(elements[piece.name])
        for parameter, pieces in holders:
            known: dict[str, Any] = {}
            for piece in pieces:
                mine = {**given.get(piece.name, {}), **values.get(piece.name, {})}
                for key, value in mine.items():
                    first = known.setdefault(key, value)
                    # As bytes: NaN is not equal to itself.
                    one, other = (dumps(tensors_inline([each])) for each in (first, value))
                    if one != other:
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
