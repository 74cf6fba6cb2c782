"""Batches: inputs and targets, whole or a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from ckptkit.errors import UsageError


def opened(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The positional and the named inputs of a batch, and its targets."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(
            "a batch is a pair of inputs and targets",
            value=type(batch).__name__,
            hint="inputs are a tensor, a tuple for several, or a dictionary for named ones",
        )
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, targets


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with other tensors in place of its own."""
    if torch.is_tensor(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [mapped(value, change) for value in batch]
        # A named tuple takes its values one by one.
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    if torch.is_tensor(batch):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    is_nested = isinstance(batch, (Mapping, tuple, list))
    return [tensor for value in values for tensor in tensors_of(value)] if is_nested else []


def share(batch: Any, number: int, count: int) -> Any:
    """One of `count` equal shares along the first dim of every tensor; other values go whole."""

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] % count:
            raise UsageError(
                f"{count} replicas cannot share this evenly",
                value=tuple(tensor.shape),
                hint="losses are means over a replica's share, which therefore have to be equal",
            )
        return tensor.chunk(count)[number]

    if count == 1:
        return batch
    _check_cut(batch, {tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim})
    return mapped(batch, chunk)


def _check_cut(batch: Any, sizes: Collection[int]) -> None:
    """Refuse arrays and lists that go with the entries of tensors, and would not be cut."""
    if isinstance(batch, np.ndarray):
        size = batch.shape[:1]
    else:
        size = (len(batch),) if isinstance(batch, list) and not tensors_of(batch) else ()
    if size and size[0] in sizes:
        raise UsageError(
            "only tensors are cut, and this has an entry for each of theirs",
            value=f"{type(batch).__name__} of {size[0]}",
            hint="make it a tensor, or share it yourself; a tuple goes to all replicas whole",
        )
    if isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            _check_cut(value, sizes)
