"""What torch's optimizers lack: compressed gradients, and steps that wait for nobody."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.table import Bar, Section
from ckptkit.parallel import AsynchronousSGD, compression_of

_RANKS, _BATCHES, _LATE = 3, 180, 0.05
_SPECS = ("", "fp16", "bf16", "int8", "topk:0.01", "powersgd:4")
_LARGEST_BYTES = {"int8": 0.27, "powersgd:4": 0.1}
# A hundredth of the gradients needs more steps, and gets there.
_LARGEST_LOSS = {"fp16": 1.1, "bf16": 1.1, "int8": 1.1, "powersgd:4": 1.1, "topk:0.01": 1.5}
_STEPS = 20
_TRAINED = 200


def benches() -> Iterator[Callable[[], Section]]:
    """All measurements."""
    yield compression
    yield asynchronous


def compression() -> Section:
    """Bytes and seconds of a step of a 1024x1024 layer on 2 ranks of this machine, and the loss
    of a small network after some steps.
    """
    found = {spec: _on_ranks(2, partial(_steps, spec)) for spec in _SPECS}
    losses = {spec: _on_ranks(2, partial(_loss_after, spec))["loss"] for spec in _SPECS}
    base = found[""]["seconds"]
    rows = [
        [
            spec or "whole",
            f"{each['share']:.3f}",
            f"{1000 * each['seconds']:.1f}",
            f"{losses[spec] / losses['']:.3f}",
        ]
        for spec, each in found.items()
    ]
    bars = [
        Bar(f"{spec}: bytes / uncompressed", found[spec]["share"], limit, at_least=False)
        for spec, limit in _LARGEST_BYTES.items()
    ]
    bars += [
        Bar(f"{spec}: loss after {_TRAINED} steps / uncompressed", ratio, most, at_least=False)
        for spec, most in _LARGEST_LOSS.items()
        for ratio in [losses[spec] / losses[""]]
    ]
    note = f"Over loopback, where bytes cost next to nothing: whole gradients take {base:.3f} s."
    columns = ["gradients", "bytes / whole", "ms a step", f"loss / whole after {_TRAINED} steps"]
    return Section("Compressed gradients, 2 ranks", columns, rows, bars, [note])


def asynchronous() -> Section:
    """The time in which three ranks, one of them slow, get through the same batches."""
    found = {
        name: _on_ranks(_RANKS, partial(_straggle, staleness))
        for name, staleness in (("synchronous", -1), ("at most 8 ahead", 8), ("asynchronous", None))
    }
    rows = [
        [name, f"{each['seconds']:.2f}", f"{each['loss']:.3f}", each["steps"]]
        for name, each in found.items()
    ]
    gain = found["synchronous"]["seconds"] / found["asynchronous"]["seconds"]
    return Section(
        f"{_BATCHES} batches on {_RANKS} ranks, one of them {1000 * _LATE:g} ms late in each step",
        ["training", "s", "loss after", "steps of each rank"],
        rows,
        [Bar("asynchronous: speed / synchronous", gain, 1.5)],
    )


def _steps(spec: str) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Linear(1024, 1024, bias=False))
    found = compression_of(spec, after=0) if spec else None
    if found:
        found.attach(model)
    inputs = torch.randn(8, 1024)
    started = 0.0
    for step in range(_STEPS + 2):
        if step == 2:
            started = time.perf_counter()
        model(inputs).square().mean().backward()
    seconds = (time.perf_counter() - started) / _STEPS
    return {
        "seconds": seconds,
        "share": found.bytes_sent / found.bytes_uncompressed if found else 1,
    }


def _loss_after(spec: str) -> dict[str, Any]:
    """Plain SGD, whose steps are as large as the gradients: it feels what is lost of them."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1)))
    if spec:
        compression_of(spec, after=0).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(_TRAINED):
        optimizer.zero_grad()
        _error(model, torch.randn(32, 32, generator=generator)).backward()
        optimizer.step()
    unseen = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return {"loss": _error(model, unseen).item()}


def _error(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    wrong: torch.Tensor = model(inputs) - inputs[:, :3].sum(1, keepdim=True)
    return wrong.square().mean()


def _straggle(staleness: int | None) -> dict[str, Any]:
    """Train on batches that are dealt out one by one; -1 is synchronous."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    deal: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 — torch has no public name for it
    rank, synchronous, steps = dist.get_rank(), staleness == -1, 0
    make = partial(torch.optim.SGD, lr=0.05)
    stepping: Any = make(model.parameters()) if synchronous else None
    wrapped = DistributedDataParallel(model) if synchronous else model
    if not synchronous:
        stepping = AsynchronousSGD(model, make, staleness=staleness)
    ends: AbstractContextManager[Any] = nullcontext() if synchronous else stepping
    dist.barrier()
    started = time.perf_counter()
    with ends:
        # All take part in a synchronous step, so it takes as many batches as there are ranks.
        while (steps * _RANKS if synchronous else deal.add("batch", 1) - 1) < _BATCHES:
            inputs = torch.randn(32, 32)
            stepping.zero_grad()
            _error(wrapped, inputs).backward()
            time.sleep(_LATE if rank == 0 else 0)
            stepping.step()
            steps += 1
        seconds = time.perf_counter() - started
        if not synchronous:
            stepping.meet()
    counts: list[Any] = [None] * _RANKS
    dist.all_gather_object(counts, (seconds, steps))
    inputs = torch.randn(1000, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = _error(model, inputs).item()
    longest = max(seconds for seconds, _ in counts)
    return {"seconds": longest, "loss": loss, "steps": ", ".join(str(n) for _, n in counts)}


def _on_ranks(ranks: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 of a gloo job of this machine finds."""
    results = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, str(Path(folder, "store")), work, results), ranks)
        found: dict[str, Any] = results.get()
    return found


def _rank(rank: int, ranks: int, path: str, work: Callable[[], Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(path, ranks), rank=rank, world_size=ranks)
    found = work()
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()
