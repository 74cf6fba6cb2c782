"""Batches: inputs and targets, whole or a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(batch, note)
    return found


def share(batch: Any, number: int, count: int) -> Any:
    """One of `count` equal shares along the first dim of every tensor."""

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] % count:
            raise UsageError(
                f"{count} replicas cannot share this evenly",
                value=tuple(tensor.shape),
                hint="losses are means over a replica's share, which therefore have to be equal",
            )
        return tensor.chunk(count)[number]

    return batch if count == 1 else mapped(batch, chunk)


def microbatches(batch: Any, count: int) -> Iterator[Any]:
    """The batch in equal pieces."""
    for number in range(count):
        yield share(batch, number, count)
