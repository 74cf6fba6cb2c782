"""The flat parameters of FSDP1: what each is made of, and how values that are cut like one become
rows of the original parameters and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.canonical import canonical_names
from ckptkit.live.topology import Topology
from ckptkit.model import Placement

Placements = Callable[[Topology], Mapping[str, Placement]]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter that lies in a flat one, and what of it this rank has."""

    name: str
    also: tuple[str, ...]
    """The other names of a tied parameter."""
    shape: tuple[int, ...]
    start: int
    """Where it begins in the whole flat parameter."""
    first: int
    """The first of its elements in this rank's shard of the flat parameter."""
    count: int
    """How many of them."""
    at: int
    """Where they begin in the shard."""
    parameter: nn.Parameter | None
    """The parameter itself, with `use_orig_params`."""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flat parameter."""

    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    group: dist.ProcessGroup | None
    """The ranks that it is cut over; None where all have it whole."""
    device: torch.device

    @property
    def keeps_originals(self) -> bool:
        """Whether the model's parameters are the original ones, as views of this one."""
        return all(piece.parameter is not None for piece in self.pieces)

    def rows(
        self, names: Collection[str], elements: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The rows that this rank has of values of the shapes of some pieces; `elements` are those
        that lie where its shard is. A collective of the group.
        """
        wanted = [piece for piece in self.pieces if piece.name in names]
        if self.group is None:
            return {piece.name: elements[piece.name].view(piece.shape) for piece in wanted}
        size, rank = self.group.size(), self.group.rank()
        shard = torch.zeros(self.shard_size, dtype=dtype, device=self.device)
        for piece in wanted:
            if piece.count:
                shard[piece.at : piece.at + piece.count] = elements[piece.name]
        whole = self._of_all_ranks(shard)
        found = {}
        for piece in wanted:
            full = whole[piece.start : piece.start + math.prod(piece.shape)].view(piece.shape)
            height = _height(piece, size)
            # In host memory: a second copy of an optimizer's state may not fit beside the first.
            found[piece.name] = full[rank * height : (rank + 1) * height].to("cpu", copy=True)
        return found

    def elements(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of values of which every rank has its rows, those elements that lie where this rank's
        shard is. A collective of the group.
        """
        wanted = [piece for piece in self.pieces if piece.name in rows]
        if self.group is None:
            return {piece.name: rows[piece.name].reshape(-1) for piece in wanted}
        size = self.group.size()
        counts = [_height(piece, size) * math.prod(piece.shape[1:]) for piece in wanted]
        ends = list(accumulate(counts))
        dtype = next(iter(rows.values())).dtype
        mine = torch.zeros(ends[-1], dtype=dtype, device=self.device)
        for piece, count, end in zip(wanted, counts, ends, strict=True):
            own = rows[piece.name].reshape(-1)
            mine[end - count : end - count + own.numel()] = own
        everyone = self._of_all_ranks(mine).view(size, -1)
        found = {}
        for piece, count, end in zip(wanted, counts, ends, strict=True):
            full = everyone[:, end - count : end].reshape(-1)
            found[piece.name] = full[piece.first : piece.first + piece.count]
        return found

    def placements(self, shape: Sequence[int]) -> Placements:
        """How the axes cut the rows of something."""
        ranks = [] if self.group is None else dist.get_process_group_ranks(self.group)
        return rows_over(ranks, shape)

    @property
    def shard_size(self) -> int:
        """How many elements each rank has, padding included."""
        size: int = self.parameter._sharded_size.numel()  # type: ignore[attr-defined]
        return size

    def _of_all_ranks(self, mine: torch.Tensor) -> torch.Tensor:
        assert self.group is not None  # noqa: S101 — the callers have looked
        found = mine.new_empty(mine.numel() * self.group.size())
        # As bytes: not every backend knows every dtype.
        dist.all_gather_single(found.view(torch.uint8), mine.view(torch.uint8), group=self.group)
        return found


def rows_over(ranks: Sequence[int], shape: Sequence[int]) -> Placements:
    """How the axes cut what some ranks in line hold rows of."""
    return lambda topology: topology.rows(ranks, shape[0])


def flats_of(module: nn.Module) -> list[Flat]:
    """The flat parameters of a module, in the same order on all ranks."""
    canonical = canonical_names(module)
    paths: dict[nn.Module, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(path)
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module)]
    return [_flat(handle, paths, canonical) for handle in handles if handle is not None]


def _flat(
    handle: Any, paths: Mapping[nn.Module, list[str]], canonical: Callable[[str], str]
) -> Flat:
    parameter = handle.flat_param
    if any(extension is not None for extension in parameter._param_extensions):
        raise UnsupportedTypeError(
            "FSDP1 over tensor parallelism is not supported",
            value=parameter._fqns[0],
            hint="fully_shard (FSDP2) goes with tensor parallelism",
        )

    def names(part: nn.Module, name: str) -> list[str]:
        return [canonical(f"{path}.{name}" if path else name) for path in paths[part]]

    known = [names(info.module, info.param_name) for info in parameter._param_infos]
    for tied in parameter._shared_param_infos:
        first = names(tied.prim_module, tied.prim_param_name)[0]
        of = next(each for each in known if each[0] == first)
        of += [name for name in names(tied.module, tied.param_name) if name not in of]
    numels = parameter._numels_with_padding
    starts = [
        end - numel
        for end, numel, padding in zip(
            accumulate(numels), numels, parameter._is_padding_mask, strict=True
        )
        if not padding
    ]
    originals = parameter._params or [None] * len(known)
    described = zip(
        known, parameter._shapes, starts, parameter._shard_param_infos, originals, strict=True
    )
    pieces = tuple(
        Piece(
            name=each[0],
            also=tuple(each[1:]),
            shape=tuple(shape),
            start=start,
            first=own.intra_param_start_idx or 0,
            count=own.numel_in_shard or 0,
            at=own.offset_in_shard or 0,
            parameter=original,
        )
        for each, shape, start, own, original in described
    )
    group = handle.process_group if handle.uses_sharded_strategy else None
    return Flat(parameter, pieces, group, handle.device)


def _height(piece: Piece, ranks: int) -> int:
    return -(-piece.shape[0] // ranks)
