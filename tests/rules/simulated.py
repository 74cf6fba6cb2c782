"""A tensor-parallel job in one process: a thread per rank, each with a model of its own parts.

Nothing of it is told how a model is cut: what a module does, and what it has to say to the other
ranks, follows from the parts that the checkpoint has for the rank, as in a real job.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import ckptkit
from ckptkit.model import Box, Layout, Replicate, Shard, layout_of
from tests.rules.models import Kind

_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_TO_LOGITS = ("lm_head", "embed_out", "predictions.decoder", "lm_head.decoder")


class Talk:
    """What ranks say to each other: every one of them says something at the same time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, mine: Tensor) -> list[Tensor]:
        """What all ranks said."""
        self._said[rank] = mine
        self._barrier.wait()
        heard = list(self._said)
        self._barrier.wait()
        return heard

    def total(self, rank: int, mine: Tensor) -> Tensor:
        """The sum of what all ranks said."""
        return torch.stack(self.gather(rank, mine)).sum(0)

    def leave(self) -> None:
        """Nothing more will come."""
        self._barrier.abort()


@dataclass(frozen=True)
class Held:
    """What one rank has of one parameter: its part, as the checkpoint gives it."""

    layout: Layout
    rank: int
    part: Tensor

    @property
    def dim(self) -> int | None:
        """The dim that is cut."""
        (placement,) = self.layout.placements
        if isinstance(placement, Replicate):
            return None
        assert isinstance(placement, Shard)
        return placement.dim

    @property
    def counts(self) -> bool:
        """Whether no rank before this one has the same."""
        return self.layout.replicas(self.rank).index == 0

    def padded(self) -> Tensor:
        """The whole parameter, with zeros where other ranks have it."""
        whole = torch.zeros(self.layout.shape)
        part = self.layout.part(self.rank)
        for box, place in zip(part.boxes, part.places, strict=True):
            whole[_slices(box)] = self.part[_slices(place)]
        return whole


def run(model: nn.Module, kind: Kind, checkpoint: ckptkit.Checkpoint) -> list[Tensor]:
    """What each rank of the checkpoint's strategy computes."""
    size = checkpoint.strategy.world_size
    talk = Talk(size)
    models = [_rank_model(model, kind, checkpoint, rank, talk) for rank in range(size)]

    def work(rank: int) -> Tensor:
        try:
            with torch.no_grad():
                return kind.forward(models[rank])
        except BaseException:
            talk.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(work, rank) for rank in range(size)]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [job.result() for job in jobs]


def _rank_model(
    model: nn.Module, kind: Kind, checkpoint: ckptkit.Checkpoint, rank: int, talk: Talk
) -> nn.Module:
    mine = copy.deepcopy(model)
    is_tp = checkpoint.strategy.mesh.axes[0].kind == "tp"
    for name, module in mine.named_modules():
        held = {
            key: _held(checkpoint, kind.stored(f"{name}.{key}".lstrip(".")), rank)
            for key, _ in module.named_parameters(recurse=False)
        }
        _use(module, name, held, talk)
        if is_tp and "Attention" in type(module).__name__:
            _divide_heads(module, rank, talk.size)
    return mine


def _held(checkpoint: ckptkit.Checkpoint, name: str, rank: int) -> Held:
    array = checkpoint[name]
    layout = layout_of(array.shape, checkpoint.strategy, array.info.placements)
    part = layout.part(rank)
    values = np.zeros(part.shape, np.float32)
    whole = array.read()
    for box, place in zip(part.boxes, part.places, strict=True):
        values[_slices(place)] = whole[_slices(box)]
    return Held(layout, rank, torch.from_numpy(values))


def _use(module: nn.Module, name: str, held: dict[str, Held], talk: Talk) -> None:
    """Give a module its parts, and make it talk where these make it do so."""
    if all(each.dim is None for each in held.values()):
        return
    if "down_proj" in held and "gate_up_proj" in held:
        _use_experts(module, held, talk)
        return
    if "weight" not in held:  # a bias that is tied to that of the module which uses it
        return
    weight, bias = held["weight"], held.get("bias")
    if isinstance(module, nn.Embedding):
        rows = weight.dim == 0
        module.weight = nn.Parameter(weight.padded() if rows else weight.part)
        if rows:
            _sums(module, weight, talk)
        return
    assert isinstance(module, nn.Linear | Conv1D), name
    module.weight = nn.Parameter(weight.part)
    if weight.dim == (1 if isinstance(module, Conv1D) else 0):
        _use_columns(module, name, weight, bias, talk)
        return
    assert bias is None or bias.dim is None, name
    if bias is not None and weight.rank != 0:
        module.bias = nn.Parameter(torch.zeros_like(bias.part))
    _sums(module, weight, talk)


def _use_columns(
    module: nn.Linear | Conv1D, name: str, weight: Held, bias: Held | None, talk: Talk
) -> None:
    """Each rank computes some of the outputs, and goes on with these, up to the logits."""
    assert bias is None or bias.dim == 0, name
    if isinstance(module, Conv1D):
        module.nf = weight.part.shape[1]
    if bias is not None:
        module.bias = nn.Parameter(bias.part)
    if name.endswith(_TO_LOGITS):
        _gathers(module, weight, talk)


def _use_experts(module: nn.Module, held: dict[str, Held], talk: Talk) -> None:
    up, down = held["gate_up_proj"], held["down_proj"]
    assert (up.dim, down.dim) in ((1, 2), (0, 0))
    by_expert = up.dim == 0
    module.gate_up_proj = nn.Parameter(up.padded() if by_expert else up.part)
    module.down_proj = nn.Parameter(down.padded() if by_expert else down.part)
    _sums(module, down, talk)


def _sums(module: nn.Module, held: Held, talk: Talk) -> None:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return talk.total(held.rank, output if held.counts else torch.zeros_like(output))

    module.register_forward_hook(hook)


def _gathers(module: nn.Module, held: Held, talk: Talk) -> None:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.cat(talk.gather(held.rank, output), dim=-1)

    module.register_forward_hook(hook)


def _divide_heads(module: Any, rank: int, size: int) -> None:
    """Make attention one of as many heads as a rank has."""
    heads = next((getattr(module, key) for key in _HEADS if hasattr(module, key)), 0)
    if hasattr(module, "config"):
        module.config = copy.copy(module.config)
    for place in (module, getattr(module, "config", None)):
        for key in (*_HEADS, *_KEY_HEADS):
            if isinstance(place, nn.Module) and hasattr(place, key):
                setattr(place, key, max(1, cast("int", getattr(place, key)) // size))
    config = getattr(module, "config", None)
    if config is not None and "num_attention_heads" in vars(config):
        whole = config.num_attention_heads
        config.num_attention_heads = whole // size
    if hasattr(module, "split_size"):
        module.split_size //= size
    if hasattr(module, "num_key_value_groups") and config is not None:
        keys = max(1, config.num_key_value_heads // size)
        module.num_key_value_groups = config.num_attention_heads // keys

    _divide_biases(module, heads, rank, size)


def _divide_biases(module: nn.Module, heads: int, rank: int, size: int) -> None:
    """Give attention of what differs from head to head what is for the heads of the rank."""
    names = list(signature(module.forward).parameters)

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in ("alibi", "attention_mask"):
            value = given.get(name)
            if isinstance(value, Tensor) and heads in value.shape:
                given[name] = value.chunk(size, dim=value.shape.index(heads))[rank]
        return (), given

    if "alibi" in names:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
