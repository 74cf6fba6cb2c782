"""What ranks have to have alike before they go on together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from ckptkit.errors import PeerError
from ckptkit.live.ranks import current_world, next_name, ranks_of

_SYNC_BYTES = 250 * 2**20


def room(what: str, timeout: float = DEFAULT_TIMEOUT) -> Ranks:
    """Where all ranks of the job meet once, without a collective."""
    world = current_world()
    return ranks_of(world, next_name(world, what), timeout, "the ranks do not go on")


def check_alike(barrier: Ranks, said: Mapping[str, Any]) -> None:
    """Raise on all ranks when one says something else than rank 0: they would wait for ever."""
    wanted = barrier.share(lambda: said)
    mine = _difference(wanted, said, barrier.rank)
    problem = barrier.agree(mine, lambda heard: next(filter(None, heard), ""))
    if problem:
        raise PeerError(problem, hint="call as_distributed alike on every rank")


def described(model: nn.Module) -> list[str]:
    """The tensors of a model, but for their values."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [
        f"{name}: {tuple(t.shape)} {t.dtype}{' trained' if t.requires_grad else ''}"
        for name, t in tensors
    ]


def described_options(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The options in groups of parameters: by their types, where they are no plain values."""
    return [
        f"{name}={_plain(value)}"
        for group in groups
        for name, value in sorted(group.items())
        if name != "params"
    ]


def give_values(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the values of rank 0, by way of the device they communicate on; there is
    never more than a few tensors, as the whole model may be too large for it.
    """
    group = cast("dist.ProcessGroup", dist.group.WORLD)
    tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
    for few in _packed(tensors, _SYNC_BYTES):
        there = [tensor.detach().to(device) for tensor in few]
        _broadcast_coalesced(group, there, _SYNC_BYTES, 0)
        for tensor, values in zip(few, there, strict=True):
            if tensor.device != values.device:
                tensor.detach().copy_(values)


def give_random_numbers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the ranks of a group draw the random numbers that its first rank draws."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        dist.broadcast(state, group=group, group_src=0)
        torch.cuda.set_rng_state(state.cpu(), device)


def _difference(wanted: Mapping[str, Any], said: Mapping[str, Any], rank: int) -> str:
    """What this rank says otherwise than rank 0; nothing where it does not."""
    for what, value in said.items():
        if value != wanted[what]:
            return f"rank {rank} has another {what} than rank 0: {_told(wanted[what], value)}"
    return ""


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))
    return repr(value) if is_plain else type(value).__name__


def _told(wanted: Any, found: Any) -> str:
    if not isinstance(found, list):
        return str(found)
    pairs = zip_longest(wanted, found, fillvalue="nothing")
    differing = [f"{b} (on rank 0 {a})" for a, b in pairs if a != b]
    return "; ".join(differing[:3])


def _packed(tensors: Iterable[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    few: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if few and held + tensor.nbytes > nbytes:
            yield few
            few, held = [], 0
        few.append(tensor)
        held += tensor.nbytes
    if few:
        yield few
