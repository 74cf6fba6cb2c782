"""Saving and loading a step in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, leaving
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.format.names import pattern_list
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.loading import Loading, LoadOptions, Restored
from ckptkit.live.mapping import mapped
from ckptkit.live.nested import nested_state, picked
from ckptkit.live.opening import open_together
from ckptkit.live.ranks import current_world, next_name, ranks_of
from ckptkit.live.state.parts import HandCuts
from ckptkit.live.state.tensors import as_bits, torch_dtype
from ckptkit.live.wrappers.training import TrainingState
from ckptkit.model import Box
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.storage import Options


def save(  # noqa: PLR0913 — everything that a step may hold
    location: Place,
    *,
    step: int,
    model: object = None,
    optimizer: object = None,
    scheduler: object = None,
    dataloader: object = None,
    scaler: object = None,
    state: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    mesh: DeviceMesh | None = None,
    rules: RulesLike | None = None,
    differing: Iterable[str] = (),
    overwrite: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
) -> str:
    """Save a step of the run at `location`, and return the step's own; every rank calls it alike.

    `storage_options` say how to reach an object store (see `ckptkit.open`).
    """
    with Checkpointer(
        location,
        mesh=mesh,
        rules=rules,
        differing=differing,
        overwrite=overwrite,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        storage_options=storage_options,
    ) as checkpointer:
        saved = checkpointer.save(
            step,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            dataloader=dataloader,
            scaler=scaler,
            state=state,
            extra=extra,
        )
    assert saved is not None  # noqa: S101 — only asynchronous saves are skipped
    return saved


def load(  # noqa: PLR0913 — everything that a step may hold, and how much may differ
    location: Place,
    *,
    model: object = None,
    optimizer: object = None,
    scheduler: object = None,
    dataloader: object = None,
    scaler: object = None,
    state: Mapping[str, object] | None = None,
    mesh: DeviceMesh | None = None,
    rules: RulesLike | None = None,
    skip: Iterable[str] = (),
    partial: bool = False,
    cast: bool = False,
    verify: bool = True,
    read_once: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
) -> Restored:
    """Load a step, or the newest committed step of a run, into live objects; every rank calls it
    alike, and rank 0 reads the manifest for all.

    `skip` names groups that are left as they are (`skip=["dataloader"]`; * and ? mean several).
    With `read_once`, what several ranks need alike is read by one of them, and reaches the others
    through the job's own network.
    """
    world = current_world()
    barrier = ranks_of(world, next_name(world, "load"), timeout, "the step was not loaded")
    with leaving(barrier):
        sources = TrainingState.of(model, optimizer, scheduler, dataloader, scaler, state, skip)
        store = store_at(location, storage_options)
    options = LoadOptions(
        partial=partial, cast=cast, verify=verify, read_once=read_once, timeout=timeout
    )
    return Loading(
        lambda barrier: open_together(barrier, store, lambda: open_checkpoint(store)),
        world,
        barrier,
        sources,
        mesh=mesh,
        rules=HandCuts.of(rules),
        options=options,
    ).run()


def load_state(
    location: Place,
    *,
    names: Iterable[str] | None = None,
    nested: bool = False,
    device: torch.device | str = "cpu",
    mmap: bool = False,
    verify: bool = True,
    storage_options: Options | None = None,
) -> dict[str, Any]:
    """Whole tensors of a step by name, without any job; all by default. `names` may be patterns
    with * and ?, which match whole names or those inside of their group, as `--include` does.

    With `nested` also what is no tensor, as nested dictionaries: `model` by the names of its
    tensors, `optimizer` with `state` (by parameter and key) and `param_groups`, `extra`, and each
    group of `state=` as it was saved, lists as lists. `names` then also picks these by their
    names, a group with all that it has. Values of each rank are a list of all ranks'; a tensor
    that wraps others is a dictionary of these.

    With `mmap` a tensor that lies in one piece of a local file is a view of it, which is neither
    read nor checked before it is used, and whose changes never reach the file. At the usual chunk
    size these are the small ones (see `mapped`); others are read as always.
    """
    patterns = None if names is None else pattern_list(names, "names")
    with open_checkpoint(location, storage_options=storage_options) as checkpoint:

        def read(wanted: list[str]) -> dict[str, torch.Tensor]:
            found = mapped(checkpoint, wanted) if mmap else {}
            rest = {n: _empty_like(checkpoint, n) for n in wanted if n not in found}
            requests = [
                (name, Box.whole(checkpoint[name].shape), as_bits(name, tensor))
                for name, tensor in rest.items()
            ]
            checkpoint.read_many(requests, verify=verify)
            tensors = found | rest
            return {name: tensors[name].to(device) for name in wanted}

        if nested:
            return nested_state(checkpoint, patterns, read)
        if patterns is None:
            return read(list(checkpoint.arrays))
        wanted: dict[str, None] = {}
        for name in patterns:
            is_pattern = "*" in name or "?" in name
            wanted |= dict.fromkeys(picked(checkpoint, (name,), []) if is_pattern else [name])
        return read(list(wanted))


def _empty_like(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    array = checkpoint[name]
    return torch.empty(array.shape, dtype=torch_dtype(array.dtype))
