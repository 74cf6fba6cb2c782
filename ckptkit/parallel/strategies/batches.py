"""Batches: inputs and targets, whole or a rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def share(batch: Any, number: int, count: int) -> Any:
    """One of `count` equal shares along the first dim of every tensor."""
    if torch.is_tensor(batch):
        if not batch.ndim or batch.shape[0] % count:
            raise UsageError(
                f"{count} replicas cannot share this evenly",
                value=tuple(batch.shape),
                hint="losses are means over a replica's share, which therefore have to be equal",
            )
        return batch.chunk(count)[number]
    if isinstance(batch, Mapping):
        return {key: share(value, number, count) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(share(value, number, count) for value in batch)
    return batch


def microbatches(batch: Any, count: int) -> Iterator[Any]:
    """The batch in equal pieces."""
    for number in range(count):
        yield share(batch, number, count)
