"""Letting a model and its optimizers take over state, once their tensors are filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.live.agreement import Documents
from ckptkit.live.snapshot import Snapshot
from ckptkit.live.wrappers.entries import parameter_names
from ckptkit.live.wrappers.training import TrainingState


def hand_over(
    sources: TrainingState, snapshot: Snapshot, values: Mapping[str, Any], documents: Documents
) -> None:
    """Give the model the values that are no tensors, by name, and optimizers what their documents
    say.
    """
    if sources.model is None:
        return
    sources.model.absorb([replace(e, value=values.get(e.name, e.value)) for e in snapshot.entries])
    names = parameter_names(snapshot.entries)
    for optimizer, states in zip(sources.optimizers, snapshot.states, strict=True):
        mine = [document for document in documents if document["kind"] == optimizer.kind]
        optimizer.absorb(names, states, _values(mine), _options(mine))


def _options(documents: Documents) -> dict[str, dict[str, Any]]:
    return {
        name: group["options"]
        for document in documents
        for group in document["groups"]
        for name in group["params"]
    }


def _values(documents: Documents) -> dict[str, dict[str, Any]]:
    return {name: v for document in documents for name, v in document["values"].items()}
