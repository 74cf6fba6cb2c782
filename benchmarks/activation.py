"""Activations of a GPT-like model under each policy, beside torch's own checkpoint."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.table import Bar, Section
from ckptkit.activation import (
    DistributedActivationStore,
    checkpoint_activations,
    kept_bytes,
    peak_bytes,
)

_WORDS, _HEAD = 512, 64
_EVERY = (1, 2, 3, 4, 6)
_FETCHED = 64 << 20
_TORCH = "torch checkpoint_wrapper"
Step = Callable[[], object]


class Block(nn.Module):
    """Attention and two layers, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream, and what the block adds to it."""
        y = self.norm1(x)
        q, k, v = (
            cut(y).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for cut in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).flatten(2)))
        done: torch.Tensor = x + self.dropout(self.down(gelu(self.up(self.norm2(x)))))
        return done


class Gpt(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From words to scores."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        done: torch.Tensor = self.head(x)
        return done


def benches(repeat: int) -> Iterator[Callable[[], Section]]:
    """On a GPU where there is one; what needs ranks on the CPU."""
    yield partial(policies, repeat)
    yield partition
    yield partial(fetching, repeat)


def policies(repeat: int, *, width: int = 256, layers: int = 12) -> Section:
    """Bytes and times of one process, measured by turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randint(0, _WORDS, (4, 257), device=device)
    models = {name: _made(width, layers, device) for name in ("none", _TORCH)}
    apply_activation_checkpointing(
        models[_TORCH], checkpoint_wrapper, lambda each: isinstance(each, Block)
    )
    whole = peak_bytes(_step(models["none"], inputs))
    budgets = {f"budget:{share}%": whole * share // 100 for share in (70, 50, 35)}
    every = {f"every:{n}": f"every:{n}" for n in _EVERY}
    for name in ("full", *every, "selective", "offload", *budgets):
        model = models[name] = _made(width, layers, device)
        policy = f"budget:{budgets[name]}" if name in budgets else name
        step = _step(model, inputs) if name in budgets else None
        checkpoint_activations(model, policy, step=step)
    steps = {name: _step(model, inputs) for name, model in models.items()}
    kept = {name: kept_bytes(partial(_loss, model, inputs)) for name, model in models.items()}
    peak = {name: peak_bytes(step) for name, step in steps.items()}
    spans = _by_turns(steps, 3 * repeat)
    took = {name: statistics.median(each) for name, each in spans.items()}
    base = took["none"]
    rows = [
        [
            name,
            f"{kept[name] / 2**20:.1f}",
            f"{peak[name] / 2**20:.1f}",
            f"{took[name] * 1e3:.0f}",
            f"{took[name] / base:.2f}",
        ]
        for name in steps
    ]
    bars = [
        _most("full: bytes kept / torch's", kept["full"] / kept[_TORCH], 1.0),
        _most("full: bytes at the peak / torch's", peak["full"] / peak[_TORCH], 1.0),
        _most("full: step / torch's checkpoint_wrapper", took["full"] / took[_TORCH], 1.05),
        _most("offload: step / without", took["offload"] / base, 1.25),
    ]
    for name, budget in budgets.items():
        bars.append(_most(f"{name}: bytes / budget", peak[name] / budget, 1.0))
        fitting = [took[each] for each in every if peak[each] <= budget]
        if fitting:
            best = took[name] / min(fitting)
            # Equal choices differ by what two runs of one differ by.
            bars.append(_most(f"{name}: step / best every:n that fits", best, 1.02))
    columns = ["", "kept MiB", "peak MiB", "step ms", "step / none"]
    title = f"Activations on {device}: {layers} blocks of width {width}"
    return Section(title, columns, rows, bars, samples=spans)


def partition() -> Section:
    """What a rank keeps of what its tensor-parallel group holds alike."""
    rows, bars = [], []
    for ranks, limit in ((2, 0.55), (4, 0.30)):
        whole, cut = _on_ranks(ranks, _partitioned)
        rows.append(
            [f"tp:{ranks}", f"{whole / 2**20:.1f}", f"{cut / 2**20:.1f}", f"{cut / whole:.2f}"]
        )
        bars.append(_most(f"partition at tp:{ranks} / not partitioned", cut / whole, limit))
    return Section(
        "Partitioned activations", ["", "full MiB", "partition MiB", "share"], rows, bars
    )


def fetching(repeat: int) -> Section:
    """64 MiB from a rank that computes nothing, beside a send and a receive of gloo."""
    fetched, sent = (statistics.median(each) for each in _on_ranks(2, _fetched, 3 * repeat))
    rows = [
        ["retrieve_or_fetch", f"{fetched * 1e3:.0f}", f"{_FETCHED / fetched / 1e9:.2f}"],
        ["gloo send/recv", f"{sent * 1e3:.0f}", f"{_FETCHED / sent / 1e9:.2f}"],
    ]
    bar = Bar("fetch of 64 MiB / gloo send and recv", sent / fetched, 0.6)
    return Section("Remote fetch", ["", "ms", "GB/s"], rows, [bar])


def _made(width: int, layers: int, device: str) -> Gpt:
    torch.manual_seed(0)
    return Gpt(width, layers).to(device)


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())


def _step(model: nn.Module, inputs: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        _loss(model, inputs).backward()

    return step


def _by_turns(steps: dict[str, Step], repeat: int) -> dict[str, list[float]]:
    spans: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeat + 1):
        for name, step in steps.items():
            start = _clock()
            step()
            if turn:  # the first one warms up
                spans[name].append(_clock() - start)
    return spans


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _most(what: str, value: float, limit: float) -> Bar:
    return Bar(what, value, limit, at_least=False)


def _partitioned() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = []
    inputs = torch.randint(0, _WORDS, (4, 128), generator=torch.Generator().manual_seed(0))
    for policy in ("full", "partition"):
        model = _made(256, 8, "cpu")
        plan: dict[str, ParallelStyle] = {}
        for name in ("q", "k", "v", "up"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("o", "down"):
            plan[f"layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh, plan)
        checkpoint_activations(model, policy)
        model.head = nn.Identity()  # type: ignore[assignment]
        result = inputs.numel() * 256 * 4
        # Gloo's threads let go of what they have sent a moment later.
        found.append(min(kept_bytes(partial(model, inputs)) for _ in range(5)) - result)
    return found[0], found[1]


def _fetched(repeat: int) -> tuple[list[float], list[float]]:
    tensor = torch.rand(_FETCHED // 4)
    fetched: list[float] = []
    sent: list[float] = []
    with DistributedActivationStore() as store:
        if store.rank == 0:
            store.register("a", tensor)
        for turn in range(repeat + 1):
            for spans in (fetched, sent):
                dist.barrier()
                start = time.perf_counter()
                if spans is fetched and store.rank == 1:
                    store.retrieve_or_fetch("a", 0)
                elif spans is sent and store.rank == 1:
                    dist.recv(torch.empty(_FETCHED // 4), 0)  # new memory, as a fetch makes it
                elif spans is sent:
                    dist.send(tensor, 1)
                if turn:
                    spans.append(time.perf_counter() - start)
    return fetched, sent


def _on_ranks(ranks: int, job: Callable[..., Any], *args: object) -> Any:
    """What the job returns on the last of some gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, folder, job, args), nprocs=ranks)
        return torch.load(Path(folder, "result"))


def _rank(rank: int, ranks: int, folder: str, job: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    result = job(*args)
    if rank == ranks - 1:
        torch.save(result, Path(folder, "result"))
    dist.barrier()
    dist.destroy_process_group()
